"""An index of one row's growing text: finds what followed a context earlier in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np

from lookahead_hf.ngram_pool.compilation import importing_numba, register
from lookahead_hf.ngram_pool.matches import (
    BORDER,
    LONGEST_MATCH,
    NUM_BUCKETS,
    NUM_KEYS,
    Continuations,
    check_limits,
)

# Entries of the table per token of natural text (4 at most), and how full the table may be.
ENTRIES_PER_TOKEN = 2.6
FILL = 0.75


class SuffixIndex:
    """Finds what followed the longest suffixes of a text earlier in the text.

    Example:
        >>> index = SuffixIndex()
        >>> index.extend([5, 6, 7, 8, 5, 6])
        >>> index.grow(np.full(NUM_BUCKETS, 0.5), max_nodes=3).token_ids.tolist()
        [7, 8, 5]
    """

    def __init__(self, min_ngram: int = 1, max_ngram: int = LONGEST_MATCH) -> None:
        """Start an empty index.

        Args:
            min_ngram: Shortest match that counts.
            max_ngram: Longest match length that is distinguished.

        Raises:
            NumbaMissingError: numba is missing or cannot be imported.
            ValueError: Not `1 <= min_ngram <= max_ngram <= 32`.
        """
        check_limits(min_ngram, max_ngram)
        _functions()
        self._limits = (min_ngram, max_ngram)
        self._text = np.empty(0, np.int32)
        self._links = np.empty((0, NUM_KEYS), np.int32)
        self._heads = np.full(64, -1, np.int32)
        self._length = self._start = self._num_entries = 0

    def __len__(self) -> int:
        """Tokens of the text, without references."""
        return self._length - self._start

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds."""
        return self._text.nbytes + self._links.nbytes + self._heads.nbytes

    def add_reference(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Put another text before the row's text: it is searched too, and no match spans both.

        Raises:
            ValueError: The row's text has begun.
        """
        if len(self):
            raise ValueError("add_reference was called after extend: references come first")
        self._append(np.append(np.asarray(token_ids, np.int32), np.int32(BORDER)))
        self._start = self._length

    def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text, [num_tokens]; a negative id is a border."""
        # A copy, since numba would compile again for a read-only or strided array.
        self._append(np.array(token_ids, np.int32))

    def grow(self, rates: np.ndarray, max_nodes: int, min_score: float = 1e-4) -> Continuations:
        """Grow a tree of what may follow the text, best nodes first.

        Args:
            rates: Acceptance rate of each bucket, [NUM_BUCKETS], values from 0 to 1.
            max_nodes: Most nodes of the tree.
            min_score: Paths with a lower score are left out.
        """
        nodes = np.empty((max_nodes, 8), np.int32)
        score = np.empty(max_nodes)
        num_nodes = _functions().grow(
            self._text,
            self._links,
            self._heads,
            self._length,
            self._limits,
            rates.astype(np.float64),
            min_score,
            nodes,
            score,
        )
        return Continuations(score[:num_nodes], *nodes[:num_nodes, :7].T.copy())

    def _append(self, token_ids: np.ndarray) -> None:  # [num_tokens] int32
        self._reserve(self._length + len(token_ids))
        while True:
            done, self._num_entries = _functions().insert(
                self._text,
                self._links,
                self._heads,
                self._length,
                self._num_entries,
                int(FILL * len(self._heads)),
                token_ids,
            )
            self._length += done
            token_ids = token_ids[done:]
            if not len(token_ids):
                return
            self._enlarge_table(len(token_ids))

    def _reserve(self, length: int) -> None:
        """Make room for a text of `length` tokens."""
        if length <= len(self._text):
            return
        room = max(length, len(self._text) * 3 // 2, 64)
        text = np.empty(room, np.int32)
        links = np.empty((room, NUM_KEYS), np.int32)
        text[: self._length] = self._text[: self._length]
        links[: self._length] = self._links[: self._length]
        self._text, self._links = text, links

    def _enlarge_table(self, num_tokens: int) -> None:
        """Move the entries to a table that has room for about `num_tokens` more tokens."""
        entries = self._num_entries + ENTRIES_PER_TOKEN * num_tokens
        heads = np.full(max(int(entries / FILL), len(self._heads) * 3 // 2), -1, np.int32)
        _functions().rehash(self._text, self._heads, heads)
        self._heads = heads


@cache
def _functions() -> ModuleType:
    with importing_numba():
        from lookahead_hf.ngram_pool import _numba
    return _numba


def _warm_up() -> None:
    index = SuffixIndex()
    index.extend(range(100))
    index.grow(np.full(NUM_BUCKETS, 0.5), 1)


register(_warm_up, "lookahead_hf.ngram_pool._numba")

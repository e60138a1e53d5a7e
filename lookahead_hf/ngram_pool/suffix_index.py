"""What followed this context in this text? An index of one row's growing text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

from lookahead_hf.ngram_pool.compilation import NumbaMissingError, register

BORDER = -1
"""Stands in an index between two texts: no match contains it, nothing continues into it."""

NUM_KEYS = 4
"""Key k is the last `2**k` tokens; between and above, comparing tokens tells the match length."""

VISITS = (32, 16, 8, 4)
"""Occurrences of each key that a look-up visits, the newest ones."""

LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)
"""Least match length of each class of match lengths."""

NUM_SHARES = 4
NUM_TOTALS = 3
NUM_BUCKETS = len(LEVELS) * NUM_SHARES * NUM_TOTALS
LONGEST_MATCH = LEVELS[-1]

# Table entries per token in natural text (4 at most), and how full the table may be.
ENTRIES_PER_TOKEN = 2.6
FILL = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """A tree of what may follow a text, the most likely paths first, parents before children.

    At every node the longest matches speak: of the occurrences of its context whose match length
    is in the class of `match_len` or a higher one (`total`), `count` were followed by the token.
    """

    score: np.ndarray  # [nodes] float64, product of the buckets' rates down the path
    token_ids: np.ndarray  # [nodes] int32
    parents: np.ndarray  # [nodes] int32, -1 for what follows the text directly
    depth: np.ndarray  # [nodes] int32, 1 for what follows the text directly
    match_len: np.ndarray  # [nodes] int32, tokens before the node that were found before
    count: np.ndarray  # [nodes] int32
    total: np.ndarray  # [nodes] int32
    bucket: np.ndarray  # [nodes] int32, class of (match_len, count / total, total)


class SuffixIndex:
    """Finds what followed the longest suffixes of a text earlier in it, however long it is.

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
            max_ngram: Longest match that is told from shorter ones.

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
        """Tokens of the text; references are not counted."""
        return self._length - self._start

    @property
    def nbytes(self) -> int:
        """Memory that the index holds."""
        return self._text.nbytes + self._links.nbytes + self._heads.nbytes

    def add_reference(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Put another text before the row's: it is searched too, no match crosses its border.

        Raises:
            ValueError: The row's text has begun.
        """
        if len(self):
            raise ValueError("add_reference was called after extend: references come first")
        self._append(np.append(np.asarray(token_ids, np.int32), np.int32(BORDER)))
        self._start = self._length

    def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text, [num_tokens]; a negative id works as a border."""
        # A copy: numba would compile once more for a read-only or strided array.
        self._append(np.array(token_ids, np.int32))

    def grow(self, rates: np.ndarray, max_nodes: int, min_score: float = 1e-4) -> Continuations:
        """Grow the tree of what may follow the text, best-first.

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
        """Move the entries to a table that should hold those of `num_tokens` more."""
        entries = self._num_entries + ENTRIES_PER_TOKEN * num_tokens
        heads = np.full(max(int(entries / FILL), len(self._heads) * 3 // 2), -1, np.int32)
        _functions().rehash(self._text, self._heads, heads)
        self._heads = heads


def check_limits(min_ngram: int, max_ngram: int) -> None:
    """Refuse match lengths that an index cannot tell apart.

    Raises:
        ValueError: They are no integers, or not `1 <= min_ngram <= max_ngram <= 32`.
    """
    # A bool is an int to Python; an array compared with a number is no truth value.
    are_ints = {type(min_ngram), type(max_ngram)} == {int}
    if not are_ints or not 1 <= min_ngram <= max_ngram <= LONGEST_MATCH:
        raise ValueError(
            f"min_ngram={min_ngram!r} and max_ngram={max_ngram!r} were given: choose integers with "
            f"1 <= min_ngram <= max_ngram <= {LONGEST_MATCH}"
        )


def level_of(match_len: int) -> int:
    """Class of a match length: its index in `LEVELS`."""
    return bisect_right(LEVELS, match_len) - 1


@cache
def _functions() -> ModuleType:
    try:
        from lookahead_hf.ngram_pool import _numba
    except Exception as error:  # numba fails in many ways where other packages do not fit it
        raise NumbaMissingError(error) from error
    return _numba


def _warm_up() -> None:
    index = SuffixIndex()
    index.extend(range(100))
    index.grow(np.full(NUM_BUCKETS, 0.5), 1)


register(_warm_up)

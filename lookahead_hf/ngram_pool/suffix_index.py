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

# Entries of the table per token of natural text (4 at most).
ENTRIES_PER_TOKEN = 2.6


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
        self._rows = SuffixIndexes(1, min_ngram, max_ngram)
        self._start = 0

    def __len__(self) -> int:
        """Tokens of the text, without references."""
        return self._rows.length(0) - self._start

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds."""
        return self._rows.nbytes

    def add_reference(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Put another text before the row's text: it is searched too, and no match spans both.

        Raises:
            ValueError: The row's text has begun.
        """
        if len(self):
            raise ValueError("add_reference was called after extend: references come first")
        self.extend([*token_ids, BORDER])
        self._start = self._rows.length(0)

    def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text, [num_tokens]; a negative id is a border."""
        self._rows.extend(np.array([0, len(token_ids)]), token_ids)

    def grow(self, rates: np.ndarray, max_nodes: int, min_score: float = 1e-4) -> Continuations:
        """Grow a tree of what may follow the text, best nodes first.

        Args:
            rates: Acceptance rate of each bucket, [NUM_BUCKETS], values from 0 to 1.
            max_nodes: Most nodes of the tree.
            min_score: Paths with a lower score are left out.
        """
        return self._rows.grow_row(0, rates, max_nodes, min_score)


class SuffixIndexes:
    """The indexes of all rows of a batch; compiled functions serve them in one call."""

    def __init__(self, num_rows: int, min_ngram: int = 1, max_ngram: int = LONGEST_MATCH) -> None:
        """Start an empty index per row; see `SuffixIndex`."""
        check_limits(min_ngram, max_ngram)
        functions = _functions()
        self._limits = (min_ngram, max_ngram)
        self._states = np.zeros((num_rows, functions.NUM_COLUMNS), np.int64)
        self._texts = [np.empty(0, np.int32)] * num_rows
        self._links = [np.empty((0, NUM_KEYS), np.int32)] * num_rows
        self._heads = [np.empty(0, np.int32)] * num_rows
        for row in range(num_rows):
            self.clear(row)

    def clear(self, row: int) -> None:
        """Forget the text of a row."""
        self._states[row] = 0
        self._texts[row], self._links[row] = (
            np.empty(0, np.int32),
            np.empty((0, NUM_KEYS), np.int32),
        )
        self._heads[row] = np.full(64, -1, np.int32)
        self._note(row)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the indexes hold."""
        return sum(array.nbytes for array in (*self._texts, *self._links, *self._heads))

    def length(self, row: int) -> int:
        """Tokens in the index of a row, borders included."""
        return int(self._states[row, _functions().LENGTH])

    def extend(self, offsets: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text of every row.

        Args:
            offsets: Where the rows' tokens lie, [rows + 1] int64.
            token_ids: Tokens of all rows, [tokens]; a negative id is a border.
        """
        # Copies, since numba would compile again for read-only or strided arrays.
        offsets, token_ids = np.array(offsets, np.int64), np.array(token_ids, np.int64)
        done = np.zeros(len(self._texts), np.int64)
        while not _functions().insert_rows(self._states, offsets, token_ids, done):
            missing = np.diff(offsets) - done
            for row in np.flatnonzero(missing).tolist():
                self._make_room(row, int(missing[row]))

    def grow(
        self,
        rates: np.ndarray,
        max_nodes: int,
        live: np.ndarray,
        min_score: float = 1e-4,
    ) -> tuple[np.ndarray, ...]:
        """Grow a tree per row, best nodes first.

        Args:
            rates: Acceptance rate of each bucket, [NUM_BUCKETS], values from 0 to 1.
            max_nodes: Most nodes of a tree.
            live: Rows that get a tree, [rows] bool.
            min_score: Paths with a lower score are left out.

        Returns:
            Row offsets, token ids, parents, depths and scores as in a `DraftTree`, and the bucket
            of each node, [nodes] int32.
        """
        grown: tuple[np.ndarray, ...] = _functions().grow_rows(
            self._states, live, self._limits, rates.astype(np.float64), min_score,
            max_nodes,
        )  # fmt: skip
        return grown

    def grow_row(
        self, row: int, rates: np.ndarray, max_nodes: int, min_score: float
    ) -> Continuations:
        """Grow the tree of one row, with all that is known of its nodes; see `SuffixIndex`."""
        nodes, score = np.empty((max_nodes, 8), np.int32), np.empty(max_nodes)
        num_nodes = _functions().grow(
            self._texts[row], self._links[row], self._heads[row], self.length(row), self._limits,
            rates.astype(np.float64), min_score, nodes, score,
        )  # fmt: skip
        return Continuations(score[:num_nodes], *nodes[:num_nodes, :7].T.copy())

    def _make_room(self, row: int, num_tokens: int) -> None:
        """Make room for so many more tokens in the text, and about as many in the table."""
        functions, state = _functions(), self._states[row]
        length = self.length(row) + num_tokens
        if length > len(self._texts[row]):
            self._enlarge_text(row, max(length, len(self._texts[row]) * 3 // 2, 64))
        num_entries, heads = int(state[functions.NUM_ENTRIES]), self._heads[row]
        if num_entries + NUM_KEYS > int(functions.FILL * len(heads)):
            size = int((num_entries + ENTRIES_PER_TOKEN * num_tokens) / functions.FILL)
            self._heads[row] = np.full(max(size, len(heads) * 3 // 2), -1, np.int32)
            functions.rehash(self._texts[row], heads, self._heads[row])
        self._note(row)

    def _enlarge_text(self, row: int, room: int) -> None:
        length = self.length(row)
        text, links = np.empty(room, np.int32), np.empty((room, NUM_KEYS), np.int32)
        text[:length], links[:length] = self._texts[row][:length], self._links[row][:length]
        self._texts[row], self._links[row] = text, links

    def _note(self, row: int) -> None:
        """Write into the state of a row where its arrays are."""
        arrays = self._texts[row], self._links[row], self._heads[row]
        addresses = [array.ctypes.data for array in arrays]
        self._states[row, :5] = *addresses, len(arrays[0]), len(arrays[2])


@cache
def _functions() -> ModuleType:
    with importing_numba():
        from lookahead_hf.ngram_pool import _rows_numba
    return _rows_numba


def _warm_up() -> None:
    index, rates = SuffixIndexes(1), np.full(NUM_BUCKETS, 0.5)
    index.extend(np.array([0, 100]), np.arange(100))
    index.grow(rates, 1, np.ones(1, bool))
    index.grow_row(0, rates, 1, 0.0)


register(_warm_up)

"""Indexes of growing texts: they find what followed a context earlier in the same text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np

from lookahead_hf.ngram_pool.compilation import drafting, importing_numba
from lookahead_hf.ngram_pool.matches import LONGEST_MATCH, NUM_BUCKETS, NUM_KEYS, check_limits
from lookahead_hf.ngram_pool.store import enlarged

# Entries of the table per token of natural text (4 at most).
ENTRIES_PER_TOKEN = 2.6

SPARE = 256
"""Tokens of room beyond those that a row lacks room for. Moving a row's tables takes 50
microseconds, and with many short texts some row would move in every step."""


class SuffixIndexes:
    """Finds what followed the longest suffixes of each row's text earlier in that text.

    Example:
        >>> indexes = SuffixIndexes(1)
        >>> indexes.extend(np.array([0, 6]), [5, 6, 7, 8, 5, 6])
        >>> _, token_ids, *_ = indexes.grow(np.full(NUM_BUCKETS, 0.5), 3, np.ones(1, bool))
        >>> token_ids.tolist()
        [7, 8, 5]
    """

    def __init__(self, num_rows: int, min_ngram: int = 1, max_ngram: int = LONGEST_MATCH) -> None:
        """Start an empty index per row, with matches of `min_ngram` to `max_ngram` tokens.

        NumbaMissingError if numba cannot be imported; ValueError as in `check_limits`.
        """
        check_limits(min_ngram, max_ngram)
        self._limits = (min_ngram, max_ngram)
        self._states = np.zeros((num_rows, _functions().NUM_COLUMNS), np.int64)
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for row in range(num_rows):
            self.clear(row)

    def clear(self, row: int) -> None:
        self._states[row] = 0
        text, links = np.empty(0, np.int32), np.empty((0, NUM_KEYS), np.int32)
        self._set(row, text, links, np.full(64, -1, np.int32))

    def length(self, row: int) -> int:
        """Return the number of tokens in the index of a row, borders included."""
        return int(self._states[row, _functions().LENGTH])

    def extend(self, offsets: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text of every row; a negative id is a border.

        `offsets` are those of the rows' tokens, [rows + 1] int64; `token_ids` are [tokens].
        """
        # Copies, since numba would compile again for read-only or strided arrays.
        offsets, token_ids = np.array(offsets, np.int64), np.array(token_ids, np.int64)
        done = np.zeros(len(self._states), np.int64)
        while not _functions().insert_rows(self._states, offsets, token_ids, done):
            missing = np.diff(offsets) - done
            for row in np.flatnonzero(missing).tolist():
                self._make_room(row, int(missing[row]))

    def grow(
        self, rates: np.ndarray, max_nodes: int, live: np.ndarray, min_score: float = 1e-4
    ) -> tuple[np.ndarray, ...]:
        """Grow a tree per live row, best nodes first, without paths that score below `min_score`.

        `rates` are [NUM_BUCKETS]. Returns row offsets, token ids, parents, depths and scores as in
        a `DraftTree`, and the bucket of each node, [nodes] int32.
        """
        return _functions().grow_rows(
            self._states, live, self._limits, rates.astype(np.float64), min_score, max_nodes
        )

    def _make_room(self, row: int, num_tokens: int) -> None:
        """Make room for `num_tokens` more in the text, and about as many in the table."""
        functions, (text, links, heads) = _functions(), self._arrays[row]
        length = self.length(row) + num_tokens
        if length > len(text):
            room = max(length + SPARE, len(text) * 3 // 2)
            text, links = enlarged(text, room), enlarged(links, room)
        num_entries = int(self._states[row, functions.NUM_ENTRIES])
        if num_entries + NUM_KEYS > int(functions.FILL * len(heads)):
            num_more = ENTRIES_PER_TOKEN * (num_tokens + SPARE)
            size = int((num_entries + num_more) / functions.FILL)
            larger = np.full(max(size, len(heads) * 3 // 2), -1, np.int32)
            functions.rehash(text, heads, larger)
            heads = larger
        self._set(row, text, links, heads)

    def _set(self, row: int, text: np.ndarray, links: np.ndarray, heads: np.ndarray) -> None:
        """Keep the arrays of a row, and write their addresses and sizes into its state."""
        self._arrays[row] = arrays = text, links, heads
        addresses = [array.ctypes.data for array in arrays]
        self._states[row, :5] = *addresses, len(text), len(heads)


@cache
def _functions() -> ModuleType:
    with importing_numba():
        from lookahead_hf.ngram_pool import _rows_numba
    return _rows_numba


def _load() -> None:
    index = SuffixIndexes(1)
    index.extend(np.array([0, 100]), np.arange(100))
    index.grow(np.full(NUM_BUCKETS, 0.5), 1, np.ones(1, bool))


drafting.register(_load)

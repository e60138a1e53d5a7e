"""Indexes of growing texts: they find what followed a context earlier in the same text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np

from lookahead_hf.ngram_pool.compilation import drafting, importing_numba
from lookahead_hf.ngram_pool.matches import LONGEST_MATCH, NUM_BUCKETS, NUM_KEYS

# Entries of the table per token of natural text (4 at most).
ENTRIES_PER_TOKEN = 2.6

SPARE = 256
"""Further tokens that a row gets room for when it needs more. Moving a row's tables takes 50
microseconds, and with many short texts some row would move in every step."""

MIN_SCORE = 1e-4  # Least score of a path that is grown

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Text, links and heads, as in `_numba`; all are int32."""


class SuffixIndexes:
    """Finds what followed the longest suffixes of each row's text earlier in that text.

    Example:
        >>> indexes = SuffixIndexes(1)
        >>> indexes.extend(np.array([0, 6]), [5, 6, 7, 8, 5, 6])
        >>> _, token_ids, *_ = indexes.grow(np.full(NUM_BUCKETS, 0.5), 3, np.ones(1, bool))
        >>> token_ids.tolist()
        [7, 8, 5]
    """

    def __init__(self, num_rows: int) -> None:
        """Start an empty index per row; NumbaMissingError if numba cannot be imported."""
        self._states = np.zeros((num_rows, _functions().NUM_COLUMNS), np.int64)
        self._arrays: dict[int, Arrays] = {}
        for row in range(num_rows):
            self.clear(row)

    def fill(self, row: int, arrays: Arrays) -> None:
        """Make these `filled` arrays the index of a row."""
        text, _, heads = arrays
        self._set(row, *arrays)
        self._states[row, _functions().LENGTH] = len(text)
        self._states[row, _functions().NUM_ENTRIES] = np.count_nonzero(heads >= 0)

    def filled(self, row: int) -> Arrays:
        """Return the arrays of a row without the room behind its text."""
        text, links, heads = self._arrays[row]
        return text[: self.length(row)], links[: self.length(row)], heads

    def clear(self, row: int) -> None:
        self._states[row] = 0
        text, links = np.empty(0, np.int32), np.empty((0, NUM_KEYS), np.int32)
        self._set(row, text, links, np.full(64, -1, np.int32))

    def length(self, row: int) -> int:
        """Return the number of tokens in the index of a row, borders included."""
        return int(self._states[row, _functions().LENGTH])

    def num_entries(self, row: int) -> int:
        """Return how many different contexts of 1, 2, 4 and 8 tokens a row has."""
        return int(self._states[row, _functions().NUM_ENTRIES])

    def extend(self, offsets: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text of every row; a negative id is a border.

        `offsets`, [rows + 1] int64, say which of `token_ids`, [tokens], belong to each row.
        """
        # Copies, since numba would compile again for read-only or strided arrays.
        offsets, token_ids = np.array(offsets, np.int64), np.array(token_ids, np.int64)
        done = np.zeros(len(self._states), np.int64)
        while not _functions().insert_rows(self._states, offsets, token_ids, done):
            missing = np.diff(offsets) - done
            for row in np.flatnonzero(missing).tolist():
                self._make_room(row, int(missing[row]))

    def with_room(self, num_now: int, num_later: int) -> SuffixIndexes:
        """Return a copy whose first row has room; it shares what need not be larger.

        `num_now` tokens can be appended without moving anything; room for `num_later` is expected
        to suffice. Others may read the old index meanwhile.
        """
        copied = SuffixIndexes(0)
        copied._states, copied._arrays = self._states.copy(), dict(self._arrays)
        copied._make_room(0, num_later, NUM_KEYS * num_now)
        return copied

    def moved_on(self, num_tokens: int) -> SuffixIndexes:
        """Return the rows moved on by one: the last is left out, the first has room for tokens."""
        moved = SuffixIndexes(len(self._states))
        for row in range(1, len(self._states)):
            moved.fill(row, self.filled(row - 1))
        moved._make_room(0, num_tokens, NUM_KEYS * num_tokens)
        return moved

    def grow(self, rates: np.ndarray, max_nodes: int, live: np.ndarray) -> tuple[np.ndarray, ...]:
        """Grow a tree per live row, best nodes first, without paths that score below `MIN_SCORE`.

        `rates` are [NUM_BUCKETS]. Returns row offsets, token ids, parents, depths and scores as in
        a `DraftTree`, and the bucket of each node, [nodes] int32.
        """
        starts, known = _functions().last_tokens(self._states, live, LONGEST_MATCH)
        rates = rates.astype(np.float64)
        return _functions().grow_rows(self._states, starts, known, rates, MIN_SCORE, max_nodes)

    def grow_after(
        self, contexts: Sequence[Sequence[int] | np.ndarray], rates: np.ndarray, max_nodes: int
    ) -> tuple[np.ndarray, ...]:
        """Grow a tree after each of some other texts, from the texts of all rows; see `grow`.

        A tree has the first row's nodes before the next one's: the same path may turn up again.
        """
        num_rows = len(self._states)
        starts = np.empty((len(contexts), LONGEST_MATCH), np.int32)
        known = np.array([min(len(context), LONGEST_MATCH) for context in contexts], np.int64)
        for start, context, length in zip(starts, contexts, known, strict=True):
            start[:length] = context[::-1][:length]
        offsets, tokens, parents, *others = _functions().grow_rows(
            np.tile(self._states, (len(contexts), 1)),
            *(np.repeat(starts, num_rows, 0), np.repeat(known, num_rows)),
            *(rates.astype(np.float64), MIN_SCORE, max_nodes),
        )
        sizes = np.diff(offsets).reshape(-1, num_rows)
        before = (sizes.cumsum(1) - sizes).ravel()
        parents = np.where(parents < 0, parents, parents + np.repeat(before, sizes.ravel()))
        return offsets[::num_rows], tokens, parents.astype(np.int32), *others

    def _make_room(self, row: int, num_tokens: int, num_entries: int = NUM_KEYS) -> None:
        """Make room for `num_tokens` more in the text, and about as many in the table.

        The table gets room for `num_entries` in any case.
        """
        functions, (text, links, heads) = _functions(), self._arrays[row]
        length = self.length(row) + num_tokens
        if length > len(text):
            room = max(length + SPARE, len(text) * 3 // 2)
            text, links = _enlarged(text, room), _enlarged(links, room)
        entries = self.num_entries(row)
        if entries + num_entries > int(functions.FILL * len(heads)):
            num_more = max(num_entries, ENTRIES_PER_TOKEN * (num_tokens + SPARE))
            size = int((entries + num_more) / functions.FILL) + 1
            larger = np.full(max(size, len(heads) * 3 // 2), -1, np.int32)
            functions.rehash(text, heads, larger)
            heads = larger
        self._set(row, text, links, heads)

    def _set(self, row: int, text: np.ndarray, links: np.ndarray, heads: np.ndarray) -> None:
        self._arrays[row] = arrays = text, links, heads
        addresses = [array.ctypes.data for array in arrays]
        self._states[row, :5] = *addresses, len(text), len(heads)


def _enlarged(array: np.ndarray, length: int) -> np.ndarray:
    larger = np.empty((length, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


@cache
def _functions() -> ModuleType:
    with importing_numba():
        from lookahead_hf.ngram_pool import _numba
    return _numba


def _load() -> None:
    index = SuffixIndexes(1)
    index.extend(np.array([0, 100]), np.arange(100))
    index.grow(np.full(NUM_BUCKETS, 0.5), 1, np.ones(1, bool))


drafting.register(_load)

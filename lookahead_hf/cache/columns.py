"""Slots of rows, and the columns that their tokens have in plain's cache."""

from __future__ import annotations

import numpy as np

from lookahead_hf.cache.slots import SlotCache, SlotGroup
from lookahead_hf.compat import Cache


class ColumnCache:
    """Slots with a column for every token in them.

    Columns are indices in plain's padded batch. Slots count the attended columns only.

    Attributes:
        num_columns: Columns of the prompt.
        slots: The content.
        for_model: The slots, together with an encoder's part of the cache.
        columns: Column of each row's token i, [rows, columns of the prompt] int64; None where that
            is i in every row.
        pads: Columns of the prompt that are not attended, [rows] int64.
    """

    for_model: Cache
    columns: np.ndarray | None = None

    def __init__(self, num_rows: int, num_columns: int = 0) -> None:
        """Prepare empty rows; by default, a token's column is its index in its row."""
        self.num_columns = num_columns
        self.slots = self.for_model = SlotCache(num_rows)
        self.pads = np.zeros(num_rows, np.int64)

    def token_columns(self, group: SlotGroup, slots: int | None = None) -> np.ndarray:
        """Return the token's column in every slot, by default visible ones, [rows, slots] int64."""
        tokens = group.dropped[:, None] + np.arange(group.visible if slots is None else slots)
        rows = np.broadcast_to(np.arange(len(tokens))[:, None], tokens.shape)
        return self.columns_of(rows, tokens)

    def columns_of(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return columns of tokens by their rows and indices in these, int64 of the same shape."""
        columns: np.ndarray = tokens + self.pads[rows]
        if self.columns is not None:
            early = tokens < self.num_columns
            columns[early] = self.columns[rows[early], tokens[early]]
        return columns

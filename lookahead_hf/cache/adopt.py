"""Take over a cache that transformers filled; hand it back as plain `generate` would leave it."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.cache.layers import GROWTH_SLOTS, SlotCache, SlotLayer
from lookahead_hf.compat import CACHE_LAYERS, Cache, DynamicLayer


def unserved_layer(cache: Cache) -> str | None:
    """Name of the first layer type that cannot be taken over, None where all can."""
    if cache.offloading:
        return "offloaded cache"
    kinds = [type(layer) for layer in cache.layers]
    if cache.layer_class_to_replicate is not None:
        kinds.append(cache.layer_class_to_replicate)
    return next((kind.__name__ for kind in kinds if kind not in CACHE_LAYERS), None)


class AdoptedCache:
    """A cache of transformers whose content lives in slots for the length of a call.

    Columns are plain's: index in the padded batch. Slots count the attended columns only. The
    content is moved layer by layer, so that no more than one layer is ever held twice.

    Attributes:
        original: The object that was taken over; empty until `hand_back`.
        slots: The content.
        columns: Column of every prompt slot, [rows, prompt slots] int64; None where slot == column.
        pads: Columns of the prompt that are not attended, [rows] int64.
    """

    def __init__(self, original: Cache, attended: np.ndarray | None, num_rows: int) -> None:
        """`attended`: [rows, columns] bool, None where every column is."""
        self.original = original
        self.num_columns = int(original.get_seq_length())
        self.slots = SlotCache(num_rows)
        self.attended = attended
        self.columns, lengths = _slot_columns(attended, self.num_columns, num_rows)
        self.slots.lengths[:] = lengths
        self.pads = self.num_columns - self.slots.lengths
        try:
            self._take()
        except BaseException:
            self._put_back()
            raise

    def _take(self) -> None:
        capacity = self.slots.longest + GROWTH_SLOTS
        for layer in self.original.layers:
            if not getattr(layer, "is_initialized", False):
                self.slots.add_empty()
                continue
            keys = self._to_slots(layer.keys, capacity)
            values = self._to_slots(layer.values, capacity)
            layer.keys = layer.values = None
            self.slots.layers.append(SlotLayer(self.slots, keys, values))
        self.slots.capacity = capacity

    def _put_back(self) -> None:
        """Undo a take-over that broke off."""
        for layer, ours in zip(self.original.layers, self.slots.layers, strict=False):
            if isinstance(ours, SlotLayer):
                self._fill(layer, ours, self.num_columns)

    def _to_slots(self, states: torch.Tensor, capacity: int) -> torch.Tensor:
        """[rows, kv_heads, held columns, dim] to [rows, capacity, kv_heads, dim]."""
        rows, heads, held, dim = states.shape
        store = states.new_zeros(rows, capacity, heads, dim)
        first = self.num_columns - held  # a sliding layer has dropped the columns before
        if self.columns is None:
            store[:, first : first + held].copy_(states.transpose(1, 2))
            return store
        for row, columns in enumerate(self.columns):
            kept = columns[columns >= first]
            slot = len(columns) - len(kept)
            index = torch.from_numpy(kept - first).to(states.device)
            picked = states[row].index_select(1, index)
            store[row, slot : slot + len(kept)].copy_(picked.transpose(0, 1))
        return store

    @property
    def windows(self) -> list[int | None]:
        """Of every layer the columns that plain's cache shows at most, None for all."""
        return [getattr(layer, "sliding_window", None) for layer in self.original.layers]

    def hand_back(self, num_columns: int) -> Cache:
        """Fill the original with its first `num_columns` columns, in its own layers.

        Columns that no row attends are zero: their K and V are never read.
        """
        for layer, ours in zip(self.original.layers, self.slots.layers, strict=True):
            if isinstance(ours, SlotLayer):
                self._fill(layer, ours, num_columns)
        return self.original

    def _fill(self, layer: DynamicLayer, ours: SlotLayer, num_columns: int) -> None:
        window = getattr(layer, "sliding_window", None)
        first = max(0, num_columns - window + 1) if window else 0
        layer.keys = self._to_columns(ours.k_store, first, num_columns)
        layer.values = self._to_columns(ours.v_store, first, num_columns)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = num_columns

    def _to_columns(self, store: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """[rows, slots, kv_heads, dim] to [rows, kv_heads, last - first, dim]."""
        if self.columns is None:
            return store[:, first:last].transpose(1, 2).contiguous()
        out = store.new_zeros(store.shape[0], last - first, *store.shape[2:])
        for row, prompt in enumerate(self.columns):
            columns = np.concatenate([prompt, np.arange(self.num_columns, last)])
            slot = int(np.searchsorted(columns, first))
            index = torch.from_numpy(columns[slot:] - first).to(store.device)
            out[row].index_copy_(0, index, store[row, slot : len(columns)])
        return out.transpose(1, 2).contiguous()


def _slot_columns(
    attended: np.ndarray | None, num_columns: int, num_rows: int
) -> tuple[list[np.ndarray] | None, np.ndarray]:
    """Column of every slot, and the length of every row."""
    if attended is None or bool(attended.all()):
        return None, np.full(num_rows, num_columns, np.int64)
    columns = [np.flatnonzero(row) for row in attended]
    return columns, attended.sum(1).astype(np.int64)

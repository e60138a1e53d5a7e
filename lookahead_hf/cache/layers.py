"""Our cache: rows left-aligned, each with its own length, so that rolling back moves no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf.compat import Cache, DynamicLayer, EmptyLayer
from lookahead_hf.kernels import PathTable

GROWTH_SLOTS = 64
"""Least slots added at once; beyond 1,024 slots a sixteenth, which keeps memory within 1.1 x."""


@dataclass(slots=True)
class Block:
    """Where the tokens of the forward in progress go, the same for every layer."""

    start: int | None  # first slot where all rows write the same range, else None
    flat_slots: torch.Tensor | None  # [rows * width] int64 into [rows * capacity], else None
    width: int
    visible: int  # slots that the attention sees, [0, visible)


class SlotLayer(DynamicLayer):
    """One layer's K and V as `[rows, slots, kv_heads, head_dim]`, shown to the model transposed.

    One token is one contiguous chunk, so that writing, compaction and decode attention touch
    contiguous memory.
    """

    def __init__(self, owner: SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take over stores of `[rows, slots, kv_heads, head_dim]`; head sizes may differ."""
        super().__init__()
        self.owner = owner
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.k_store, self.v_store = keys, values

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots; one after the other, so that one copy is held twice."""
        self.k_store = _grown(self.k_store, capacity)
        self.v_store = _grown(self.v_store, capacity)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the block's K and V, [rows, kv_heads, width, head_dim]; show all visible slots."""
        block = self.owner.block
        assert block is not None
        for store, states in ((self.k_store, key_states), (self.v_store, value_states)):
            if block.start is not None:
                store[:, block.start : block.start + block.width].copy_(states.transpose(1, 2))
            else:
                flat = store.view(-1, *store.shape[2:])
                slots = self.owner.flat_slots_on(store.device)
                flat.index_copy_(0, slots, states.transpose(1, 2).reshape(-1, *store.shape[2:]))
        seen = slice(0, block.visible)
        return self.k_store[:, seen].transpose(1, 2), self.v_store[:, seen].transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        block = self.owner.block
        return (self.owner.longest + query_length if block is None else block.visible), 0


def _grown(store: torch.Tensor, capacity: int) -> torch.Tensor:
    """The same slots with room for `capacity`; the rest is zero, since masked NaN would spread."""
    if store.shape[1] >= capacity:
        return store
    grown = store.new_zeros(store.shape[0], capacity, *store.shape[2:])
    grown[:, : store.shape[1]].copy_(store)
    return grown


class SlotCache(Cache):
    """A cache of `SlotLayer`s with one length per row.

    Attributes:
        lengths: Tokens of each row that are kept, [rows] int64.
        capacity: Slots that every layer has room for.
        shown: Slots that the attention sees in every forward, None for those that are in use.
        block: Where the forward in progress writes.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(layers=[])
        self.lengths = np.zeros(num_rows, np.int64)
        self.capacity = 0
        self.shown: int | None = None
        self.block: Block | None = None
        self._path_table: PathTable | None = None
        self._slots_by_device: dict[torch.device, torch.Tensor] = {}

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return int(self.lengths.max())

    @property
    def path_table(self) -> PathTable:
        """K and V of every layer that holds any, prepared for compaction."""
        if self._path_table is None:
            layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
            self._path_table = PathTable([s for la in layers for s in (la.k_store, la.v_store)])
        return self._path_table

    def add_empty(self) -> None:
        """A layer that shares the K and V of another one holds nothing."""
        self.layers.append(EmptyLayer())

    def reserve(self, slots: int) -> None:
        """Make room for `slots` in every layer."""
        if slots <= self.capacity:
            return
        self._grow(slots + max(GROWTH_SLOTS, slots // 16))

    def fix(self, slots: int) -> None:
        """Make room for `slots` at once and show them all in every forward."""
        if slots > self.capacity:
            self._grow(slots)
        self.shown = slots

    def _grow(self, capacity: int) -> None:
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.grow(capacity)
        self.capacity = capacity
        self._path_table = None

    def place(self, width: int) -> None:
        """Put the next `width` tokens of every row behind its length.

        Args:
            width: Tokens per row, padding included.
        """
        self.reserve(self.longest + width)
        visible = max(self.longest + width, self.shown or 0)
        if len(self.lengths) == 1 or bool((self.lengths == self.lengths[0]).all()):
            self.block = Block(int(self.lengths[0]), None, width, visible)
            return
        rows = np.arange(len(self.lengths))[:, None] * self.capacity
        flat = rows + self.lengths[:, None] + np.arange(width)[None]
        self._slots_by_device.clear()
        self.block = Block(None, torch.from_numpy(flat.reshape(-1)), width, visible)

    def flat_slots_on(self, device: torch.device) -> torch.Tensor:
        """The block's flat slots on a layer's device, copied once per step."""
        assert self.block is not None and self.block.flat_slots is not None
        if device not in self._slots_by_device:
            self._slots_by_device[device] = self.block.flat_slots.to(device)
        return self._slots_by_device[device]

"""A layer of slots, as the model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lookahead_hf.cache.storage import Stores
from lookahead_hf.compat import DynamicLayer, StateLayer

if TYPE_CHECKING:
    from lookahead_hf.cache.slots import SlotGroup


@dataclass(slots=True)
class Block:
    """Places where a forward writes its tokens, the same for every layer of a group."""

    span: slice | None  # of slots, where all rows write the same ones, else None
    flat_slots: torch.Tensor | None  # [tokens] int64 into [rows * capacity], else None
    visible: int  # slots that the attention sees, [0, visible)


class SlotLayer(DynamicLayer):
    """One layer's K and V as `[rows, slots, kv_heads, head_dim]`, shown to the model transposed.

    One token is one contiguous chunk, so that writing, compaction and decode attention touch
    contiguous memory.
    """

    def __init__(self, group: SlotGroup, stores: Stores, index: Stores | None = None) -> None:
        """`index` holds the keys of the layer's indexer in `k_store`, and no values."""
        super().__init__()
        self.group, self.stores, self.index = group, stores, index
        keys = stores.k_store
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        # Mllama asks every layer for its size.
        self.keys = self.values = keys.new_empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the block's K and V, [rows, kv_heads, width, head_dim]; return all visible ones.

        A flat block has [1, kv_heads, tokens, head_dim].
        """
        if not self.stores.is_shaped:
            self.stores.shape(self.group.capacity, key_states, value_states)
        keys = self._written(self.stores.k_store, key_states)
        values = self._written(self.stores.v_store, value_states)
        if self.group.extent.copies:
            return keys.contiguous(), values.contiguous()
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys of the block's indexer, [rows, width, dim]; show all visible slots."""
        assert self.index is not None
        return self._written(self.index.k_store, indexer_key_states[:, None])[:, 0]

    def _written(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write states, [rows, heads, width, dim]; return the visible slots in the same order."""
        block, shown = self.group.block, store.transpose(1, 2)
        assert block is not None
        states = states.to(store.dtype)  # under autocast, K and V may come in other types
        if block.span is not None:
            shown[:, :, block.span].copy_(states)
            return shown.narrow(2, 0, block.visible)
        slots, of_token = self.group.flat_slots_on(store.device), store.shape[2:]
        if len(states) < len(store):
            return _written_flat(store, states, slots, block.visible)
        tokens = states.transpose(1, 2).reshape(-1, *of_token)
        store.view(-1, *of_token).index_copy_(0, slots, tokens)
        return shown.narrow(2, 0, block.visible)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """K, V and the indexer's keys if there are any, [rows, slots, heads, dim] each."""
        index = [] if self.index is None else [self.index.k_store]
        return [self.stores.k_store, self.stores.v_store, *index]

    def get_seq_length(self) -> int:
        return self.group.extent.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        block = self.group.block
        return (self.group.longest + query_length if block is None else block.visible), 0


class StateSlotLayer(StateLayer, SlotLayer):
    """A layer with K and V in slots, and beside them the state of a layer of transformers."""

    def __init__(self, slots: SlotLayer, of: Any) -> None:
        SlotLayer.__init__(self, slots.group, slots.stores)
        for name in vars(StateLayer(of.number_of_states)).keys() - {"device", "dtype"}:
            setattr(self, name, getattr(of, name))


def _written_flat(
    store: torch.Tensor,  # [rows, capacity, heads, dim]
    states: torch.Tensor,  # [1, heads, tokens, dim]
    slots: torch.Tensor,  # [tokens] into [rows * capacity]
    visible: int,
) -> torch.Tensor:  # [rows, heads, visible, dim]
    """Write the states of a flat block; return the visible slots.

    Two views do the work of five: to make a view takes a layer as long as to copy the numbers.
    """
    assert store.is_contiguous()
    rows, capacity, heads, dim = store.shape
    by_row, by_slot, by_head, _ = store.stride()
    flat = store.as_strided((1, heads, rows * capacity, dim), (0, by_head, by_slot, 1))
    flat.index_copy_(2, slots, states)
    return store.as_strided((rows, heads, visible, dim), (by_row, by_head, by_slot, 1))

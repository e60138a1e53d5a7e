"""A layer of our cache as the model sees it."""

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
    """Where a forward writes its tokens, the same for every layer of a group."""

    span: slice | None  # of slots, where all rows write the same ones, else None
    flat_slots: torch.Tensor | None  # [tokens] int64 into [rows * capacity], else None
    visible: int  # slots that the attention sees, [0, visible)


class SlotLayer(DynamicLayer):
    """One layer's K and V as `[rows, slots, kv_heads, head_dim]`, shown to the model transposed.

    One token is one contiguous chunk, so that writing, compaction and decode attention touch
    contiguous memory.
    """

    def __init__(self, group: SlotGroup, stores: Stores, index: Stores | None = None) -> None:
        """`index` has the keys of the layer's indexer in `k_store`, and no values."""
        super().__init__()
        self.group, self.stores, self.index = group, stores, index
        keys = stores.k_store
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        # Mllama asks every layer for its size.
        self.keys = self.values = keys.new_empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the block's K and V; return those of all visible slots.

        Args:
            key_states: [rows, kv_heads, width, head_dim]; of a flat block [1, kv_heads, tokens,
                head_dim].
            value_states: The same of V.
        """
        if not self.stores.is_shaped:
            self.stores.shape(self.group.capacity, key_states, value_states)
        keys = self._written(self.stores.k_store, key_states.transpose(1, 2))
        values = self._written(self.stores.v_store, value_states.transpose(1, 2))
        shown = keys.transpose(1, 2), values.transpose(1, 2)
        if self.group.extent.copies:
            return shown[0].contiguous(), shown[1].contiguous()
        return shown

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys of the block's indexer, [rows, width, dim]; show all visible slots."""
        assert self.index is not None
        return self._written(self.index.k_store, indexer_key_states[:, :, None])[:, :, 0]

    def _written(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write states, [rows, width, heads, dim] or [1, tokens, ...]; return the visible slots."""
        block = self.group.block
        assert block is not None
        if block.span is not None:
            store[:, block.span].copy_(states.reshape(len(store), -1, *store.shape[2:]))
        else:
            flat = store.view(-1, *store.shape[2:])
            slots = self.group.flat_slots_on(store.device)
            flat.index_copy_(0, slots, states.reshape(-1, *store.shape[2:]))
        return store[:, : block.visible]

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

"""The cache of a call: slots of rows, their layers, and their columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf.draft import place_in_row
from lookahead_hf.kernels import compact_on_host
from lookahead_hf.kernels.data import PathTable
from lookahead_hf.model.compat import HYBRID_LAYERS, Cache, DynamicLayer, EmptyLayer, StateLayer


@dataclass(eq=False)
class Extent:
    """The slots of every row that are in use, and those that the attention reads."""

    lengths: np.ndarray  # tokens of each row that are kept, [rows] int64
    shown: int | None = None  # slots that attention sees in every forward, None for those in use
    # Lengths after the prompt, [rows], if all rows may be handed back where the slowest one is, so
    # that each must keep what that row sees; else None.
    starts: np.ndarray | None = None

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return int(self.lengths.max())

    @property
    def lead(self) -> np.ndarray | int:
        """Tokens that each row keeps beyond its window, [rows] int64."""
        if self.starts is None:
            return 0
        fed = self.lengths - self.starts
        return fed - int(fed.min())


@dataclass(eq=False)
class Stores:
    """K and V of a layer, [rows, slots, kv_heads, head_dim] each; head sizes may differ.

    `dropped`, [rows] int64, counts the tokens of each row that came before its first slot.
    """

    k_store: torch.Tensor
    v_store: torch.Tensor
    dropped: np.ndarray

    def shape(self, capacity: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make room for K and V with heads like those of states, [any, kv_heads, any, dim] each."""
        for name, states in (("k_store", keys), ("v_store", values)):
            _, heads, _, dim = states.shape
            rows, dtype = self.k_store.shape[0], torch.promote_types(keys.dtype, states.dtype)
            vars(self)[name] = states.new_zeros(rows, capacity, heads, dim, dtype=dtype)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots, first in K, then in V, to hold only one extra copy."""
        self.k_store = _grown(self.k_store, capacity)
        self.v_store = _grown(self.v_store, capacity)

    def drop(self, counts: np.ndarray) -> None:  # [rows]
        """Drop the oldest tokens of every row and move the others to the front.

        K, V and `dropped` are replaced together: an interrupt or lack of memory harms no layer.
        """
        last, device = self.k_store.shape[1] - 1, self.k_store.device
        slots = torch.from_numpy(counts[:, None] + np.arange(last + 1)).clamp_(max=last)
        at = torch.arange(len(counts), device=device)[:, None], slots.to(device)
        vars(self).update(
            k_store=self.k_store[at], v_store=self.v_store[at], dropped=self.dropped + counts
        )


def _grown(store: torch.Tensor, capacity: int) -> torch.Tensor:
    """Copy the slots to room for `capacity`; the rest is zero, since masked NaN would spread."""
    if store.shape[1] >= capacity:
        return store
    grown = store.new_zeros(store.shape[0], capacity, *store.shape[2:])
    grown[:, : store.shape[1]].copy_(store)
    return grown


@dataclass(slots=True)
class BlockPlaces:
    """Places where a forward writes its tokens, the same for every layer of a group."""

    span: slice | None  # of slots, where all rows write the same ones, else None
    slot_mapping: torch.Tensor | None  # [tokens] int64 into [rows * capacity], else None
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

        A packed block has [1, kv_heads, tokens, head_dim].
        """
        if not self.stores.k_store.shape[2]:  # nobody knows yet how many heads there are
            self.stores.shape(self.group.capacity, key_states, value_states)
        keys = self._written(self.stores.k_store, key_states)
        return keys, self._written(self.stores.v_store, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys of the block's indexer, [rows, width, dim]; show all visible slots."""
        assert self.index is not None
        return self._written(self.index.k_store, indexer_key_states[:, None])[:, 0]

    def _written(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write states, [rows, heads, width, dim]; return the visible slots in the same order."""
        block, shown = self.group.block, store.transpose(1, 2)
        if block.span is not None:
            shown[:, :, block.span].copy_(states)
            return shown.narrow(2, 0, block.visible)
        states = states.to(store.dtype)  # under autocast, K and V may come in other types
        slots, of_token = self.group.slot_mapping_on(store.device), store.shape[2:]
        if len(states) < len(store):
            return _written_packed(store, states, slots, block.visible)
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


def _written_packed(
    store: torch.Tensor,  # [rows, capacity, heads, dim]
    states: torch.Tensor,  # [1, heads, tokens, dim]
    slots: torch.Tensor,  # [tokens] into [rows * capacity]
    visible: int,
) -> torch.Tensor:  # [rows, heads, visible, dim]
    """Write the states of a packed block; return the visible slots.

    Two views do the work of five: to make a view takes a layer as long as to copy the numbers.
    """
    assert store.is_contiguous()
    rows, capacity, heads, dim = store.shape
    by_row, by_slot, by_head, _ = store.stride()
    flat = store.as_strided((1, heads, rows * capacity, dim), (0, by_head, by_slot, 1))
    flat.index_copy_(2, slots, states)
    return store.as_strided((rows, heads, visible, dim), (by_row, by_head, by_slot, 1))


GROWTH_SLOTS = 64
"""Fewest slots added at once. Beyond 1,024 slots a sixteenth is added: at most 1.1x the memory."""


class SlotGroup:
    """Layers with the same mask, in which every token has the same slot.

    Layers with a window drop tokens that no later token sees when their room is used up, and move
    the others to the front.

    Attributes:
        window: Tokens before its own that a token may see, None for all.
        num_kept: The same, or more if plain's layers hold more; 0 without a window.
        dropped: Tokens of each row that came before its first slot, [rows] int64.
        capacity: Slots that every layer has room for.
        block: Where the forward in progress writes, a `Block`; None before the first one.
    """

    def __init__(self, extent: Extent, window: int | None = None, num_kept: int = 0) -> None:
        self.extent, self.window = extent, window
        self.num_kept = max(num_kept, window or 0)
        self.layers: list[Stores] = []
        self.dropped = np.zeros_like(extent.lengths)
        self.capacity = 0
        self.block: Any = None
        self._path_table: PathTable | None = None
        # Memory ran out before the last layer had grown, or had dropped its tokens.
        self._is_uneven = self._is_dropping = False
        self._slots_by_device: dict[torch.device, torch.Tensor] = {}

    @property
    def lengths(self) -> np.ndarray:
        """Slots of each row that are in use, [rows] int64."""
        return self.extent.lengths - self.dropped

    @property
    def longest(self) -> int:
        """Most slots that a row uses."""
        return int(self.lengths.max())

    @property
    def visible(self) -> int:
        """Slots that the attention sees in the forward in progress."""
        return self.block.visible

    @property
    def stores(self) -> list[torch.Tensor]:
        """Tensors of all layers, [rows, capacity, heads, head_dim] each."""
        pairs = [store for layer in self.layers for store in (layer.k_store, layer.v_store)]
        return [store for store in pairs if store.shape[3]]  # an indexer has no values

    @property
    def path_table(self) -> PathTable:
        """K and V of every layer, prepared for compaction."""
        if self._path_table is None:
            self._path_table = PathTable(self.stores)
        return self._path_table

    def roomy(self, slots: int) -> int:
        """Return the capacity to allocate where `slots` are needed."""
        least = GROWTH_SLOTS if self.window is None else GROWTH_SLOTS // 4
        return slots + max(least, slots // 16)

    def reserve(self, slots: int, width: int = 0) -> None:
        """Make room for `slots` in every layer, the last `width` of them for a block.

        Layers with a window drop tokens before they grow, so they need no further room.
        """
        if slots > self.capacity or self._is_uneven:
            is_whole = self.window is None
            wanted = self.roomy(slots) if is_whole else max(slots, self.roomy(slots - width))
            self.grow(max([wanted, *(store.shape[1] for store in self.stores)]))

    def grow(self, capacity: int) -> None:
        """Give every layer exactly this room."""
        self._path_table = None  # it would hold all K and V until the last layer has grown
        self._is_uneven = True
        for layer in self.layers:
            layer.grow(capacity)
        self.capacity, self._is_uneven = capacity, False

    def move_to(
        self, stores: list[tuple[torch.Tensor, torch.Tensor]], capacity: int, table: PathTable
    ) -> None:
        """Copy the content to other K and V of this capacity, and use these from then on.

        The slots behind the content are zero, since NaN would spread from masked slots.
        """
        for layer, pair in zip(self.layers, stores, strict=True):
            for new, old in zip(pair, (layer.k_store, layer.v_store), strict=True):
                held = min(capacity, old.shape[1])
                new[:, :held].copy_(old[:, :held])
                new[:, held:].zero_()
            layer.k_store, layer.v_store = pair
        self.capacity, self._path_table = capacity, table

    def place(self, counts: int | np.ndarray, is_packed: bool = False) -> None:
        """Put the next `counts` tokens, [rows] or for all rows, of every row behind its length.

        A block that `is_packed` has these tokens alone, one row after another.
        """
        counts = np.broadcast_to(counts, len(self.dropped))
        self.drop_unseen(int((self.lengths + counts).max()))
        lengths, width = self.lengths, int(counts.max())
        used = int((lengths + counts).max())
        self.reserve(used, width)
        visible = max(used, self.extent.shown or 0)
        # Where shapes are fixed, rows of equal lengths take the same way as all others.
        if not is_packed and self.extent.shown is None and bool((lengths == lengths[0]).all()):
            self.block = BlockPlaces(slice(used - width, used), None, visible)
            return
        first = np.arange(len(counts)) * self.capacity + lengths
        flat = np.repeat(first, counts) + place_in_row(np.concatenate([[0], counts.cumsum()]))
        self._slots_by_device.clear()
        self.block = BlockPlaces(None, torch.from_numpy(flat), visible)

    def place_at(self, slot_mapping: torch.Tensor, visible: int) -> None:
        """Put the next tokens into these slots, [rows * width] into [rows * capacity]."""
        self.block = BlockPlaces(None, slot_mapping, visible)
        self._slots_by_device = {slot_mapping.device: slot_mapping}

    def drop_unseen(self, slots: int) -> None:
        """Drop tokens that no window reaches, if there is no room for so many slots."""
        if self.window is None or (slots <= self.capacity and not self._is_dropping):
            return
        gone = np.maximum(self.lengths - self.num_kept - self.extent.lead, 0)
        if gone.any():
            self._path_table, self._is_dropping = None, True
            for layer in self.layers:
                if (layer.dropped == self.dropped).all():
                    layer.drop(gone)
            self.dropped, self._is_dropping = self.dropped + gone, False

    def slot_mapping_on(self, device: torch.device) -> torch.Tensor:
        """Return `block.slot_mapping` on a device; it is copied once per block."""
        if device not in self._slots_by_device:
            self._slots_by_device[device] = self.block.slot_mapping.to(device)
        return self._slots_by_device[device]


class SlotCache(Cache):
    """A cache of `SlotLayer`s with one length per row.

    Attributes:
        lengths: Tokens of each row, [rows] int64; changed in place, as `extent` has the same array.
        groups: The layers by mask.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(layers=[])
        self.lengths = np.zeros(num_rows, np.int64)
        self.extent = Extent(self.lengths)
        self.groups: dict[str, SlotGroup] = {}

    def each_group(self) -> list[SlotGroup]:
        return list(dict.fromkeys(self.groups.values()))

    def add(
        self,
        name: str,
        keys: torch.Tensor,
        values: torch.Tensor,
        indexer_keys: torch.Tensor | None = None,
        *,
        of: Any = None,
    ) -> None:
        """Append a layer with K and V, [rows, slots, heads, dim] each, to the group of a name.

        `indexer_keys` are the keys of its indexer. `of` is the layer of transformers that held all
        these, and may go on holding a state.
        """
        group, stores = self.groups[name], Stores(keys, values, self.groups[name].dropped)
        index = None
        if indexer_keys is not None:
            no_values = indexer_keys.new_empty(*indexer_keys.shape[:3], 0)
            index = Stores(indexer_keys, no_values, group.dropped)
        group.layers += [stores] if index is None else [stores, index]
        group.capacity = keys.shape[1]
        ours = SlotLayer(group, stores, index)
        self.layers.append(StateSlotLayer(ours, of) if isinstance(of, HYBRID_LAYERS) else ours)

    def add_other(self, layer: Any) -> None:
        """Append a layer without K and V: itself if it holds a state, else an empty one."""
        self.layers.append(layer if isinstance(layer, StateLayer) else EmptyLayer())

    def reserve(self, slots: int) -> None:
        """Make room for so many slots in layers that hold whole texts."""
        for group in self.each_group():
            if group.window is None:
                group.reserve(slots)

    def fix(self, slots: int) -> None:
        """Make room for `slots` now, and let the attention read all of them in every forward."""
        for group in self.each_group():
            if slots > group.capacity:
                group.grow(slots)
        self.extent.shown = slots

    def place(self, counts: int | np.ndarray, is_packed: bool = False) -> None:
        """Put the next tokens of every row behind its length; see `SlotGroup.place`."""
        for group in self.each_group():
            group.place(counts, is_packed)

    def clear(self, rows: Iterable[int] | None = None) -> None:
        """Set K and V behind the kept tokens to zero, in all layers, of some rows or of all."""
        chosen = None if rows is None else set(rows)
        for group in self.each_group():
            for row, length in enumerate(group.lengths.tolist()):
                if chosen is None or row in chosen:
                    for store in group.stores:
                        store[row, length:] = 0

    def compact(self, path: np.ndarray, counts: np.ndarray) -> None:
        """Move paths of the latest block to the front of it, in every layer.

        `path`, [rows, most] int64, has `counts`, [rows], tokens of each row's block on its path.
        """
        for group in self.each_group():
            if group.layers:
                # A row that is not in the block may fill its room; its first path token stays.
                lengths = np.minimum(group.lengths, group.capacity - 1)
                compact_on_host(group.path_table, lengths, path, counts)


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

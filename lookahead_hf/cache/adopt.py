"""Moves caches of transformers into slots and back, and prompts into rows of a queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lookahead_hf.cache import hf_layers
from lookahead_hf.cache.slots import ColumnCache, SlotCache, SlotGroup, SlotLayer
from lookahead_hf.model.compat import Cache, is_users_cache, self_attention, with_self_attention


class AdoptedCache(ColumnCache):
    """A cache of transformers whose content is in slots for the length of a call.

    The content is moved layer by layer, so that at most one layer is held twice. Only the tensors
    of a static cache that the caller made stay in place beside ours.

    Attributes:
        original: transformers' cache; empty until `hand_back`.
        seen: By mask, most columns before its own that a token sees in plain's cache, None for all.
    """

    def __init__(
        self,
        original: Cache,
        attended: np.ndarray | None,  # [rows, columns] bool; None: every column
        num_rows: int,
        masks: Sequence[str | None] = ("",),
        trims: bool = True,
        returned: bool = False,
        num_columns: int | None = None,
        is_fed: bool = False,
    ) -> None:
        """Move the content into slots.

        Args:
            original: The cache after the prompt.
            attended: Which of its columns are attended.
            num_rows: Rows of the batch.
            masks: Name of each layer's mask, or a single name for all layers; None for a layer that
                does not grow with the text.
            trims: Whether layers with a window hold no more than the window.
            returned: Whether the caller sees the cache afterwards.
            num_columns: Columns of the prompt; None for as many as `original` holds.
            is_fed: Whether slots will be fed the prompt without pads. None can be handed back then.
        """
        held = original.get_seq_length() if num_columns is None else num_columns
        super().__init__(num_rows, int(held))
        self.original, self._text = original, self_attention(original)
        self._is_fed = is_fed
        self._known: dict[Any, Any] = {}
        self.slots.lengths[:] = self.num_columns
        # Where the caller sees the cache and may attend a row's pads later: the rows, the columns
        # and the content of all pads, by the id of a layer.
        self._pads_of: dict[int, tuple[torch.Tensor, torch.Tensor, hf_layers.Content]] = {}
        unattended = None
        if attended is not None and not attended.all():
            unattended = ~attended
            self.slots.lengths[:] = attended.sum(1)
        self.slots.extent.starts = self.slots.lengths.copy() if returned else None
        self.pads = self.num_columns - self.slots.lengths
        if unattended is not None:
            token, lengths = np.arange(self.num_columns), self.slots.lengths[:, None]
            in_prompt = np.argsort(unattended, axis=1, kind="stable")
            self.columns = np.where(token < lengths, in_prompt, token + self.pads[:, None])
        if self._is_fed:
            self.slots.lengths[:] = 0
        self._masks = masks
        self._group(masks, trims)
        self.for_model = with_self_attention(original, self.slots)
        try:
            self._take(unattended if returned else None)
        except BaseException:
            self.hand_back(self.num_columns)  # the layers that were taken
            raise

    def _named_layers(self) -> Iterator[tuple[str | None, Any]]:
        for index, layer in enumerate(self._text.layers):
            yield self._masks[min(index, len(self._masks) - 1)], layer

    def _group(self, masks: Sequence[str | None], trims: bool) -> None:
        """Group layers by mask and window; layers without a common window hold the whole text."""
        found: dict[str, set[tuple[int | None, int | None]]]
        found = {name: set() for name in masks if name is not None}
        for name, layer in self._named_layers():
            if name is not None and (self._is_fed or hf_layers.read(layer) is not None):
                found[name].add((hf_layers.window(layer), hf_layers.most_columns(layer)))
        whole = SlotGroup(self.slots.extent)
        self.seen: dict[str, int | None] = {}
        for name, limits in found.items():
            window, most = limits.pop() if len(limits) == 1 else (None, None)
            self.seen[name] = window
            if not trims or window is None or most is None:
                self.slots.groups[name] = whole
                continue
            self.slots.groups[name] = group = SlotGroup(self.slots.extent, window, most)
            group.dropped = np.maximum(self.slots.lengths - group.num_kept, 0)

    def _take(self, unattended: np.ndarray | None) -> None:
        for name, layer in self._named_layers():
            if name is None:
                self.slots.layers.append(layer)
                continue
            if self._is_fed:  # the K and V that the layer gets first shape it
                self.slots.add(name, *torch.empty(2, len(self.pads), 0, 0, 0))
                continue
            content = hf_layers.read(layer)
            if content is None:
                self.slots.add_other(layer)
                continue
            stores = [self._to_slots(states, self.slots.groups[name]) for states in content]
            if unattended is not None:
                first = self.num_columns - content[0].shape[2]
                rows, columns = torch.from_numpy(unattended[:, first:]).nonzero(as_tuple=True)
                kept = tuple(states[rows, :, columns] for states in content)
                self._pads_of[id(layer)] = rows, columns + first, kept
            self.slots.add(name, *stores, of=layer)  # before the release, for `hand_back`
            hf_layers.release(layer, is_users_cache(self.original))

    def _to_slots(self, states: torch.Tensor, group: SlotGroup) -> torch.Tensor:
        """Turn [rows, kv_heads, held columns, dim] into [rows, capacity, kv_heads, dim]."""
        rows, heads, count, dim = states.shape
        store = states.new_zeros(rows, group.roomy(group.longest), heads, dim)
        first = self.num_columns - count  # a layer with a window has dropped the columns before
        row, slot, column = self._places(group.dropped, first, self.num_columns, states.device)
        store[row, slot] = states.transpose(1, 2)[row, column]
        return store

    def _places(self, dropped: np.ndarray, first: int, last: int, device: Any) -> Any:
        """Return row, slot and column less `first` of the tokens in columns `first` to `last`.

        They are slices where all rows are alike, and the same for all layers of a group. `dropped`,
        [rows], counts the tokens before the first slot.
        """
        asked = first, last, dropped.tobytes(), device
        if asked in self._known:
            return self._known[asked]
        gone = int(dropped[0])
        if self.columns is None and (dropped == gone).all():
            begin = max(first, gone)
            slots, columns = slice(begin - gone, last - gone), slice(begin - first, last - first)
            self._known[asked] = slice(None), slots, columns
            return self._known[asked]
        row, token = np.indices((len(dropped), last))
        column = self.columns_of(row, token)
        held = (token >= dropped[:, None]) & (column >= first) & (column < last)
        slot = token - dropped[:, None]
        found = np.stack([row[held], slot[held], column[held] - first])
        self._known[asked] = torch.from_numpy(found).to(device).unbind(0)
        return self._known[asked]

    def hand_back(self, num_columns: int) -> Cache:
        """Fill the original's own layers with the first `num_columns` columns, and return it.

        If the caller sees the cache, columns that a row does not attend get their old content back,
        since a later call may attend them. Otherwise they are zero.
        """
        for layer, ours in zip(self._text.layers, self.slots.layers, strict=False):
            if isinstance(ours, SlotLayer):
                self._fill(layer, ours, num_columns)
        return self.original

    def _fill(self, layer: object, ours: SlotLayer, num_columns: int) -> None:
        most = hf_layers.most_columns(layer)
        first = 0 if most is None else max(0, num_columns - most)
        places = ours.stores.dropped, first, num_columns
        content = tuple(self._to_columns(store, *places) for store in ours.tensors)
        if id(layer) in self._pads_of:
            rows, columns, kept = self._pads_of[id(layer)]
            held = columns >= first
            for states, values in zip(content, kept, strict=True):
                states[rows[held], :, columns[held] - first] = values[held]
        hf_layers.fill(layer, content, num_columns)

    def _to_columns(
        self, store: torch.Tensor, dropped: np.ndarray, first: int, last: int
    ) -> torch.Tensor:
        """Turn [rows, slots, kv_heads, dim] into [rows, kv_heads, last - first, dim]."""
        out = store.new_zeros(store.shape[0], store.shape[2], last - first, store.shape[3])
        row, slot, column = self._places(dropped, first, last, store.device)
        out.transpose(1, 2)[row, column] = store[row, slot]
        return out


class TextCache(ColumnCache):
    """Slots for unpadded texts that come and go."""

    def take(self, row: int, prompt: SlotCache) -> None:
        """Copy a prompt's K and V, from a cache of the prompt alone, into a free row."""
        for ours, theirs in zip(self.slots.each_group(), prompt.each_group(), strict=True):
            held = int(theirs.lengths[0])
            ours.reserve(held)
            for store, states in zip(ours.stores, theirs.stores, strict=True):
                store[row, :held].copy_(states[0, :held])
        self._set(row, int(prompt.lengths[0]), [int(g.dropped[0]) for g in prompt.each_group()])

    def holds(self, row: int, length: int) -> bool:
        """Return whether a row still holds what the token after its first `length` tokens sees."""
        return all(
            group.window is None or group.dropped[row] <= max(0, length - group.window)
            for group in self.slots.each_group()
        )

    def share(self, row: int, source: int, length: int) -> None:
        """Copy the first `length` tokens of a source to a row; cut a row that is its own source."""
        for group in self.slots.each_group() if row != source else ():
            held = length - int(group.dropped[source])
            for store in group.stores:
                store[row, :held].copy_(store[source, :held])
        self._set(row, length, [int(group.dropped[source]) for group in self.slots.each_group()])

    def free(self, row: int) -> None:
        self._set(row, 0, [0] * len(self.slots.each_group()))

    def _set(self, row: int, length: int, dropped: list[int]) -> None:
        self.slots.lengths[row] = length
        for group, count in zip(self.slots.each_group(), dropped, strict=True):
            if group.dropped[row] != count:  # another array tells the device of it
                group.dropped = group.dropped.copy()
                group.dropped[row] = count
                for layer in group.layers:
                    layer.dropped = group.dropped

    def build_like(self, prompt: SlotCache) -> None:
        """Make groups and layers like those of a prompt's cache, with rows of zeros."""
        names: dict[SlotGroup, str] = {}
        built: dict[SlotGroup, SlotGroup] = {}
        for name, group in prompt.groups.items():
            if group not in built:
                built[group] = SlotGroup(self.slots.extent, group.window, group.num_kept)
            names.setdefault(group, name)
            self.slots.groups[name] = built[group]
        for layer in prompt.layers:
            if isinstance(layer, SlotLayer):
                stores = layer.stores.k_store, layer.stores.v_store
                zeros = (each.new_zeros(len(self.pads), *each.shape[1:]) for each in stores)
                self.slots.add(names[layer.group], *zeros)
            else:
                self.slots.add_other(layer)

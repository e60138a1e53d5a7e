"""Moves a cache of transformers into slots, and back as plain `generate` leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lookahead_hf.cache import hf_layers
from lookahead_hf.cache.slots import ColumnCache, SlotGroup, SlotLayer
from lookahead_hf.model.compat import Cache, is_users_cache, self_attention, with_self_attention

MOST_COPIES = 8
"""Most rows that are copied one by one; of more rows all tokens are copied at once."""

_Part = tuple[slice, slice, np.ndarray]


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
            is_fed: Whether the slots will be fed the prompt without its pads. They cannot be handed
                back then.
        """
        held = original.get_seq_length() if num_columns is None else num_columns
        super().__init__(num_rows, int(held))
        self.original, self._text = original, self_attention(original)
        self._is_fed = is_fed
        self._known: dict[Any, tuple[list[_Part], dict[torch.device, Any]]] = {}
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
        """Yield the layers of the original with the names of their masks."""
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
            content = hf_layers.read(layer)
            if self._is_fed:
                self.slots.add_unshaped(name)
                continue
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
        parts, known = self._parts(group.dropped, first, self.num_columns)
        if len(parts) > MOST_COPIES:
            row, slot, column = _places(parts, first, states.device, known)
            store[row, slot] = states.transpose(1, 2)[row, column]
            return store
        for of, slots, columns in parts:
            index = _index(columns - first, states.device)
            store[of, slots].copy_(states[of][:, :, index].transpose(1, 2))
        return store

    def _parts(
        self, dropped: np.ndarray, first: int, last: int
    ) -> tuple[list[_Part], dict[torch.device, Any]]:
        """Return the rows, slots and columns of the tokens in columns `first` to `last` of a layer.

        All layers of a group have the same. `dropped`, [rows], counts the tokens before the first
        slot. The dict is a cache for `_places`.
        """
        asked = first, last, dropped.tobytes()
        if asked in self._known:
            return self._known[asked]
        counts, parts = dropped.tolist(), []
        alike = self.columns is None and len(set(counts)) == 1
        for row, gone in enumerate(counts[:1] if alike else counts):
            tokens = np.arange(last - self.pads[row])
            columns = self.columns_of(np.full_like(tokens, row), tokens)
            token = max(int(np.searchsorted(columns, first)), gone)
            of = slice(None) if alike else slice(row, row + 1)
            parts.append((of, slice(token - gone, len(columns) - gone), columns[token:]))
        found: tuple[list[_Part], dict[torch.device, Any]] = parts, {}
        self._known[asked] = found
        return found

    def seen_slots(
        self, row: int, kept: list[int], num_layers: int
    ) -> list[list[torch.Tensor | None]]:
        """Return the slots that tokens of a row in the latest block see, by token and layer.

        `kept` are the places of these tokens in the block, root first; the lengths count them
        already. Slots are in the order of the columns of plain's cache, -1 for pads. They are those
        of `num_layers` layers that attend, None for a layer that attends to something else.
        """
        length = int(self.slots.lengths[row]) - len(kept)  # where the block begins
        prompt, first = np.arange(self.num_columns), self.num_columns - int(self.pads[row])
        if self.columns is not None:
            prompt = np.full(self.num_columns, -1)
            prompt[self.columns[row, :first]] = np.arange(first)
        tokens = np.concatenate([prompt, np.arange(first, length), length + np.array(kept)])
        views, out = self._views(row, num_layers), []
        for end in range(len(tokens) - len(kept) + 1, len(tokens) + 1):
            shown = {view: _slots(tokens[:end], *view) for view in set(views) if view is not None}
            out.append([None if view is None else shown[view] for view in views])
        return out

    def _views(self, row: int, num_layers: int) -> list[tuple[int | None, int] | None]:
        """Return the window in plain's cache of layers that attend, and what the row has dropped.

        Where the forward shows fewer layers than the cache has, those without K and V of the text
        are left out. Other layers without them share those of an earlier layer with their mask.
        """
        views: list[tuple[int | None, int] | None] = []
        own: dict[str | None, tuple[int | None, int]] = {}  # of each mask the latest
        layers = [*zip(self._text.layers, self.slots.layers, strict=True)]
        for index in range(max(num_layers, len(layers))):
            mask = self._masks[min(index, len(self._masks) - 1)]
            layer, ours = layers[index] if index < len(layers) else (None, None)
            if isinstance(ours, SlotLayer):
                own[mask] = hf_layers.window(layer), int(ours.group.dropped[row])
            elif num_layers < len(layers):
                continue
            views.append(own.get(mask))
        return views

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
        dropped = ours.stores.dropped
        content = tuple(
            self._to_columns(store, dropped, first, num_columns) for store in ours.tensors
        )
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
        parts, known = self._parts(dropped, first, last)
        if len(parts) > MOST_COPIES:
            row, slot, column = _places(parts, first, store.device, known)
            out.transpose(1, 2)[row, column] = store[row, slot]
            return out
        for of, slots, columns in parts:
            index = _index(columns - first, store.device)
            out[of][:, :, index] = store[of, slots].transpose(1, 2)
        return out


def _places(
    parts: list[_Part], first: int, device: torch.device, known: dict[torch.device, Any]
) -> Any:
    """Return row, slot and column less `first` of every token in parts, kept in `known`."""
    if device not in known:
        counts = [len(columns) for _, _, columns in parts]
        row = np.repeat([of.start for of, _, _ in parts], counts)
        slot = np.concatenate([np.arange(slots.start, slots.stop) for _, slots, _ in parts])
        column = np.concatenate([columns for _, _, columns in parts]) - first
        known[device] = torch.from_numpy(np.stack([row, slot, column])).to(device).unbind(0)
    return known[device]


def _index(places: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Return ascending places as an index, a slice if possible, which saves a copy."""
    if len(places) and int(places[-1] - places[0]) + 1 == len(places):
        return slice(int(places[0]), int(places[-1]) + 1)
    return torch.from_numpy(places).to(device)


def _slots(tokens: np.ndarray, window: int | None, dropped: int) -> torch.Tensor:
    """Return the slots of a row's tokens within a window, -1 for pads."""
    newest = tokens if window is None else tokens[-window - 1 :]
    return torch.from_numpy(np.where(newest < 0, -1, newest - dropped))

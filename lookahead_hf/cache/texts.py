"""A cache whose rows are taken by one text after another."""

from __future__ import annotations

from lookahead_hf.cache.slots import ColumnCache, SlotCache, SlotGroup, SlotLayer


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
        """Empty a row."""
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

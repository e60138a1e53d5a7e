"""A cache whose rows are taken by one text after another."""

from __future__ import annotations

from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.slot_layer import SlotLayer
from lookahead_hf.cache.slots import SlotCache, SlotGroup


class RefilledCache(AdoptedCache):
    """Slots for texts without padding that come and go; nothing is handed back.

    A token's column is its index in its own text.
    """

    def __init__(self, num_rows: int) -> None:
        """Begin with empty rows; the layers are made like those of the first prompt."""
        self.num_columns, self.columns = 0, None
        self.slots = self.for_model = SlotCache(num_rows)
        self.pads = self.slots.lengths.copy()

    def take(self, row: int, prompt: SlotCache) -> None:
        """Copy a prompt's K and V into a free row.

        Args:
            row: The row.
            prompt: The cache of the prompt alone.
        """
        if not self.slots.layers:
            self._build_like(prompt)
        for ours, theirs in zip(self.slots.each_group(), prompt.each_group(), strict=True):
            held = int(theirs.lengths[0])
            ours.reserve(held)
            for store, states in zip(ours.stores, theirs.stores, strict=True):
                store[row, :held].copy_(states[0, :held])
        self._set(row, int(prompt.lengths[0]), [int(g.dropped[0]) for g in prompt.each_group()])

    def holds(self, row: int, length: int) -> bool:
        """Return whether a row holds all that the token behind its first `length` tokens sees."""
        return all(
            group.window is None or group.dropped[row] <= max(0, length - group.window)
            for group in self.slots.each_group()
        )

    def share(self, row: int, source: int, length: int) -> None:
        """Give a row the first tokens of another row, or leave a row no more than its own.

        The source, perhaps the same row, `holds` so many tokens.
        """
        for group in self.slots.each_group() if row != source else ():
            held = length - int(group.dropped[source])
            for store in group.stores:
                store[row, :held].copy_(store[source, :held])
        self._set(row, length, [int(group.dropped[source]) for group in self.slots.each_group()])

    def free(self, row: int) -> None:
        """Let go of what a row holds."""
        self._set(row, 0, [0] * len(self.slots.each_group()))

    def _set(self, row: int, length: int, dropped: list[int]) -> None:
        self.slots.lengths[row] = length
        for group, count in zip(self.slots.each_group(), dropped, strict=True):
            group.dropped[row] = count
            for layer in group.layers:
                layer.dropped[row] = count

    def _build_like(self, prompt: SlotCache) -> None:
        """Make the groups and layers that the prompt's cache has, with rows of zeros."""
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

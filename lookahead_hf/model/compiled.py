"""Models that run code of `torch.compile`, and the few shapes of their blocks."""

from __future__ import annotations

import torch

from lookahead_hf import compat
from lookahead_hf.cache.slots import SlotCache
from lookahead_hf.model.facts import facts_of

WIDTHS = (64, 16, 1)
"""Tokens per row of a compiled model's blocks; a draft takes the narrowest that holds it."""

LEAST_SHOWN = 256
"""Slots that attention sees in the first blocks, doubled as the texts grow."""


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether the model, or a part of it, is called through `torch.compile`."""
    return facts_of(model).is_compiled


def captures_graphs(module: torch.nn.Module) -> bool:
    """Return whether a module's compiler captures CUDA graphs, as `mode="reduce-overhead"` does."""
    for call in compat.compiled_calls(module):
        ask = getattr(call, "get_compiler_config", None)
        settings = ask() if ask is not None else None  # None for compilers other than inductor
        if settings and settings.get("triton.cudagraphs"):
            return True
    return False


def width_for(tokens: int, widths: tuple[int, ...] = WIDTHS) -> int:
    """Return the narrowest width that holds `tokens` tokens per row."""
    return min((width for width in widths if width >= tokens), default=tokens)


def doubled(least: int, slots: int) -> int:
    """Return `least`, doubled until it is no less than `slots`."""
    while least < slots:
        least *= 2
    return least


def make_room(slots: SlotCache, used: int) -> int:
    """Give the layers a power of two of slots, at least `used`; return how many a forward sees.

    It sees all of them, because compiled code is specialised to the shape of the layers.
    """
    if slots.extent.shown is None or used > slots.extent.shown:
        capacity = max(group.capacity for group in slots.each_group())
        shown = doubled(LEAST_SHOWN, max(used, capacity))
        slots.fix(shown)
        return shown
    return slots.extent.shown

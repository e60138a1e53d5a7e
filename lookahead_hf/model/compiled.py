"""Which models run compiled code, and the few shapes that their blocks then have."""

from __future__ import annotations

import torch

from lookahead_hf import compat
from lookahead_hf.cache.slots import SlotCache
from lookahead_hf.model.facts import facts_of

WIDTHS = (64, 16, 1)
"""Tokens per row of the blocks of a compiled model; a draft takes the narrowest that holds it."""

LEAST_SHOWN = 256
"""Slots that the attention of the first blocks sees; doubled as the texts grow."""


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether the model, or a part of it, is called through `torch.compile`."""
    return facts_of(model).is_compiled


def captures_graphs(module: torch.nn.Module) -> bool:
    """Whether a module's compiler captures CUDA graphs, as with `mode="reduce-overhead"`."""
    for call in compat.compiled_calls(module):
        ask = getattr(call, "get_compiler_config", None)
        settings = ask() if ask is not None else None  # None for compilers other than inductor
        if settings and settings.get("triton.cudagraphs"):
            return True
    return False


def width_for(tokens: int, widths: tuple[int, ...] = WIDTHS) -> int:
    """Return the narrowest width of a block that holds so many tokens per row."""
    return min((width for width in widths if width >= tokens), default=tokens)


def doubled(least: int, slots: int) -> int:
    """Return `least`, doubled until it holds so many slots."""
    while least < slots:
        least *= 2
    return least


def make_room(slots: SlotCache, used: int) -> int:
    """Give the layers a power of two of slots, and show all of them in every forward.

    A compiled forward is made for the shape of the layers and of what it sees of them.

    Args:
        slots: The cache.
        used: Slots that the next forward needs.

    Returns:
        The slots that the forward sees.
    """
    if slots.extent.shown is None or used > slots.extent.shown:
        capacity = max(group.capacity for group in slots.each_group())
        shown = doubled(LEAST_SHOWN, max(used, capacity))
        slots.fix(shown)
        return shown
    return slots.extent.shown

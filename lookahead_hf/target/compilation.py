"""Which models run compiled code, and the few shapes that their blocks then have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lookahead_hf.cache.layers import SlotCache

WIDTHS = (64, 16, 1)
"""Tokens per row of the blocks of a compiled model; a draft takes the narrowest that holds it."""

LEAST_SHOWN = 256
"""Slots that the attention of the first blocks sees; doubled as the texts grow."""


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model, or a part of it, is called through `torch.compile`."""
    return any(True for _ in _compiled_calls(model))


def has_own_graphs(model: torch.nn.Module) -> bool:
    """Whether its compiler captures CUDA graphs itself, as with `mode="reduce-overhead"`."""
    for call in _compiled_calls(model):
        ask = getattr(call, "get_compiler_config", None)
        settings = ask() if ask is not None else None  # None for other compilers than inductor
        if settings and settings.get("triton.cudagraphs"):
            return True
    return False


def _compiled_calls(model: torch.nn.Module) -> Iterator[Any]:
    """What `torch.compile` made of the forwards of a model and of its parts."""
    for module in model.modules():
        own = vars(module)
        for call in (own.get("_compiled_call_impl"), own.get("forward")):
            if hasattr(call, "_torchdynamo_orig_callable"):
                yield call


def width_for(tokens: int) -> int:
    """The width of a block that holds so many tokens per row."""
    return min((width for width in WIDTHS if width >= tokens), default=tokens)


def make_room(slots: SlotCache, used: int) -> int:
    """Show a power of two of slots, which is all that the layers have, in every forward.

    A compiled forward is made for the shape of the layers as well as for what is seen of them.

    Args:
        slots: The cache.
        used: Slots that the next forward needs.

    Returns:
        The slots that are shown.
    """
    if slots.shown is None or used > slots.shown:
        capacity = max(group.capacity for group in slots.each_group())
        shown = LEAST_SHOWN
        while shown < max(used, capacity):
            shown *= 2
        slots.fix(shown)
        return shown
    return slots.shown

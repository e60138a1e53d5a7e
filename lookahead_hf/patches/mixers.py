"""Mixers of a model, the modules with a recurrent state, inside our forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lookahead_hf import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.patches import trust
from lookahead_hf.patches.forward import current
from lookahead_hf.patches.install import SetOwn


def put_under(model: nn.Module, give: SetOwn) -> None:
    """Have a model's mixers run our blocks by the forwards of the context."""
    for module in facts_of(model).mixers:
        give(module, "forward", _in_steps(module))


def _in_steps(module: Any) -> Callable[..., Any]:
    """Return a `forward` for a mixer that differs from its own within our forwards only."""
    original = short = module.forward
    if trust.is_untouched(module):
        short = compat.without_padding(module)  # pads short blocks to their own length only

    def forward(*args: Any, **kwargs: Any) -> Any:
        context = current()
        run = None if context is None else context.mixers.get(id(module))
        return original(*args, **kwargs) if run is None else run(short, *args, **kwargs)

    return forward

"""What is called in place of a module, and whether anybody would miss the module's own call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lookahead_hf import compat
from lookahead_hf.patches.install import SharedChange

_STOCK = [
    (own, name, getattr(own, name))
    for own, names in (
        (torch, ("cat", "rsqrt")),
        (functional, ("gelu", "layer_norm", "linear", "silu")),
        (nn.Linear, ("forward",)),
    )
    for name in names
]
"""Functions that layers call, as they are when this module is imported."""


def is_stock() -> bool:
    """Return whether nobody has replaced the functions that layers call."""
    return all(getattr(own, name) is each for own, name, each in _STOCK)


def is_watched() -> bool:
    """Return whether a hook sees the calls of all modules, or a mode those of all functions.

    The mode of `torch.set_default_device` and of `with torch.device(...)` sees nothing but where
    new tensors are made.
    """
    has_modes = compat.watches_functions() or compat.watches_operations()
    return has_modes or any(compat.global_hooks())


def laid(calls: list[tuple[nn.Module, Any]], users: set[object]) -> SharedChange:
    """Lay calls under modules; a module that `torch.compile` has given one keeps it."""
    attributes = [(vars(module), call) for module, call in calls]

    def put() -> None:
        for own, call in attributes:
            own.setdefault(compat.CALL, call)

    def take_out() -> None:
        for own, call in attributes:
            if own.get(compat.CALL) is call:
                del own[compat.CALL]

    return SharedChange(users, put, take_out)

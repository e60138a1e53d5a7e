"""Steps on a CPU without the layers of torch's dispatcher that serve gradients.

With gradients off, every operation still passes the layers that count writes and note of which
tensor another one is a view. They take 1.3 to 1.9 of the 31 to 37 ms of a step (SmolLM2-135M,
bfloat16, two cores). `torch.inference_mode` leaves them out too, but nobody may write later to the
tensors that are made inside, and a module may keep some.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lookahead_hf import compat
from lookahead_hf.runner.linear_calls import is_watched

_below: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", nullcontext)

PACKAGES = ("torch", "transformers")


class BelowAutograd:
    """The forwards of one call's steps.

    Code of unknown origin may turn gradients on, or write to what a stand-in has seen, and such
    writes are not counted here. So every part of the model must be torch's or transformers' own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Look at the classes and the weights of a model's modules."""
        given = list(modules)
        self._attributes = [*map(vars, given)] if all(map(_is_known, given)) else []

    def step(self) -> AbstractContextManager[Any]:
        """Return a context for a forward; it does nothing where a module is no longer known."""
        if not self._attributes or torch.is_grad_enabled() or is_watched():
            return nullcontext()
        if any(map(_is_changed, self._attributes)):
            return nullcontext()
        context: AbstractContextManager[Any] = _below()
        return context


def _is_known(module: nn.Module) -> bool:
    """Whether a module's code is torch's or transformers', and its weights are plain, on a CPU."""
    kind = type(module)
    origins = kind.__module__, kind.forward.__module__
    return all(origin.partition(".")[0] in PACKAGES for origin in origins) and all(
        type(each) is nn.Parameter and each.device.type == "cpu"
        for each in module._parameters.values()
        if each is not None
    )


def _is_changed(attributes: dict[str, Any]) -> bool:
    """Whether a module has another forward than its class, or hooks of the user's."""
    if "forward" in attributes:
        return True
    hooks = attributes["_forward_hooks"], attributes["_forward_pre_hooks"]
    return any(hooks) and not all(
        compat.captures_outputs(each) for of in hooks for each in of.values()
    )

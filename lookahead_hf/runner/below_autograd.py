"""Steps on a CPU without the layers of torch's dispatcher that serve gradients.

With gradients off, every operation still passes the layers that count writes and note of which
tensor another one is a view. They take 1.3 to 1.9 of the 31 to 37 ms of a step (SmolLM2-135M,
bfloat16, two cores). `torch.inference_mode` leaves them out too, but nobody may write later to the
tensors that are made inside, and a module may keep some.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
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
    writes are not counted here. So every module must be torch's or transformers' own, and so must
    the functions that its forward names and the registered attention.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Look at the classes and the weights of a model's modules."""
        given = list(modules)
        kinds = {type(each) for each in given}
        self._code = {found for kind in kinds for found in _code(kind)}
        is_known = (
            all(kind.__module__.partition(".")[0] in PACKAGES for kind in kinds)
            and all(_is_own(function) for _, _, function in self._code)
            and all(map(_has_plain_weights, given))
        )
        self._parts = [_Part(each) for each in given] if is_known else []

    def step(self) -> AbstractContextManager[Any]:
        """Return a context for a forward; it does nothing where a module is no longer known."""
        if not self._parts or torch.is_grad_enabled() or is_watched() or self._is_changed():
            return nullcontext()
        context: AbstractContextManager[Any] = _below()
        return context

    def _is_changed(self) -> bool:
        """Whether other code than before may run, as a streamer or a processor can arrange it."""
        return (
            not _is_own(compat.attention_function("sdpa"))
            or any(getattr(owner, name, None) is not found for owner, name, found in self._code)
            or any(map(_Part.is_changed, self._parts))
        )


class _Part:
    """A module as it was at the beginning of a call."""

    __slots__ = ("_attributes", "_children", "_kind", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._attributes = module, type(module), vars(module)
        self._children = module._modules.copy()

    def is_changed(self) -> bool:
        """Whether it has another class or forward, other children, or hooks of the user's."""
        attributes = self._attributes
        if type(self._module) is not self._kind or "forward" in attributes:
            return True
        if attributes["_modules"] != self._children:
            return True
        hooks = attributes["_forward_hooks"], attributes["_forward_pre_hooks"]
        return any(hooks) and not all(
            compat.captures_outputs(each) for of in hooks for each in of.values()
        )


def _code(kind: type[nn.Module]) -> list[tuple[Any, str, Any]]:
    """Return what a call of a class begins with, by owner and name: what somebody may patch.

    These are its `__call__`, its forward, and the functions of its file that the forward names.
    """
    forward = getattr(kind, "forward", None)
    found: list[tuple[Any, str, Any]] = [
        (kind, "__call__", kind.__call__),
        (kind, "forward", forward),
    ]
    inner = inspect.unwrap(forward) if forward else None
    if isinstance(inner, FunctionType):
        file = sys.modules.get(inner.__module__)
        named = ((file, name, getattr(file, name, None)) for name in inner.__code__.co_names)
        found += [each for each in named if isinstance(each[2], FunctionType)]
    return found


def _is_own(function: Any) -> bool:
    """Whether a function, and each one that it wraps, is defined in torch or transformers.

    Its `__module__` does not tell, since `functools.wraps` copies that of the wrapped function.
    """
    origin = getattr(function, "__globals__", {}).get("__name__", "")
    if origin.partition(".")[0] not in PACKAGES:
        return False
    wrapped = getattr(function, "__wrapped__", None)
    return wrapped is None or _is_own(wrapped)


def _has_plain_weights(module: nn.Module) -> bool:
    """Whether a module's weights are ordinary ones on a CPU."""
    return all(
        type(each) is nn.Parameter and each.device.type == "cpu"
        for each in module._parameters.values()
        if each is not None
    )

"""Steps on a CPU without the layers of torch's dispatcher that serve gradients.

With gradients off, every operation still passes the layers that count writes and note of which
tensor another one is a view. They take 1.3 to 1.9 of the 31 to 37 ms of a step (SmolLM2-135M,
bfloat16, two cores). `torch.inference_mode` leaves them out too, but nobody may write later to the
tensors that are made inside, and a module may keep some.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lookahead_hf import compat

_below: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", nullcontext)

PACKAGES = ("torch", "transformers")


class BelowAutograd:
    """The forwards of one call's steps.

    Code of unknown origin may turn gradients on, or write to what a stand-in has seen, and such
    writes are not counted here. So every module must be torch's or transformers' own when the call
    begins, with the functions that its forward names, and the registered attention. What a streamer
    or a processor changes in mid call is looked for in the modules: hooks, and forwards of theirs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Look at the classes and the weights of a model's modules."""
        functions = {each for kind in set(map(type, modules)) for each in _functions(kind)}
        functions.add(compat.attention_function("sdpa"))
        is_known = all(map(_is_own, functions)) and all(map(_has_plain_weights, modules))
        self._modules = modules if is_known else ()

    def step(self) -> AbstractContextManager[Any]:
        """Return a context for a forward; it does nothing where other code may run inside."""
        if not self._modules or torch.is_grad_enabled():
            return nullcontext()
        if any("forward" in vars(each) or compat.is_hooked(each) for each in self._modules):
            return nullcontext()
        context: AbstractContextManager[Any] = _below()
        return context


def _functions(kind: type[nn.Module]) -> set[Any]:
    """Return the class, its `__call__`, its forward, and the functions that the forward names."""
    forward = getattr(kind, "forward", None)
    own = inspect.unwrap(forward) if forward else None
    named = own.__code__.co_names if isinstance(own, FunctionType) else ()
    in_file = (getattr(sys.modules[kind.__module__], name, None) for name in named)
    return {kind, kind.__call__, forward, *(each for each in in_file if inspect.isfunction(each))}


def _is_own(code: Any) -> bool:
    """Whether a class or a function, and each one that it wraps, is torch's or transformers'.

    The `__module__` of a function does not tell: `functools.wraps` copies that of the wrapped one.
    """
    names = getattr(code, "__globals__", None)
    origin: str = names["__name__"] if names else getattr(code, "__module__", "")
    wrapped = getattr(code, "__wrapped__", None)
    return origin.partition(".")[0] in PACKAGES and (wrapped is None or _is_own(wrapped))


def _has_plain_weights(module: nn.Module) -> bool:
    """Whether a module's weights are ordinary ones on a CPU."""
    return all(
        type(each) is nn.Parameter and each.device.type == "cpu"
        for each in module._parameters.values()
        if each is not None
    )

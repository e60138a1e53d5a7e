"""What lies under the modules of a model in our steps, and which layers read the same input.

For the length of a step, a stand-in lies under the `__call__` of each module that is computed in
another way: of a linear layer by a packed copy or together with other layers, of a norm by a
compiled function. It does so where the module would do nothing but the forward of its class, and
calls the module in every other case. All other code stays the model's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from lookahead_hf.runner.shared_change import SharedChange

CALL = "_compiled_call_impl"
"""The attribute that torch calls in place of a module's hooks and forward. Copies and pickles of a
module leave it out, so that a model can be copied and saved in the middle of a step."""

NO_PRODUCT: tuple[Any, Any, Any, list[Any]] = (None, None, None, [])


class OnThread(threading.local):
    """What a model's stand-ins share on one thread.

    Attributes:
        depth: Steps in progress.
        num_products: Multiplications by stand-ins so far.
        product: The latest product of layers that read the same input: whose it is, the input, its
            stamp, and the outputs that no layer has returned yet.
    """

    depth = num_products = 0
    product = NO_PRODUCT

    def part(
        self,
        index: int,
        x: torch.Tensor,
        owner: object,
        multiply: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> torch.Tensor:
        """Return the output of one of the layers that read the same input.

        The first of them to be called multiplies for all.

        Args:
            index: Which of the layers it is.
            x: The input.
            owner: What these layers share and no other layers do.
            multiply: Takes the input and returns the outputs of all of them.
        """
        known, given, stamped, parts = self.product
        is_same = known is owner and given is x and _is_unwritten(x, stamped)
        if not is_same or parts[index] is None:  # None: the layer is called a second time
            parts = [*multiply(x)]
            self.product = owner, x, _stamp(x), parts
        part: torch.Tensor = parts[index]
        parts[index] = None
        return part


def _stamp(x: torch.Tensor) -> Any:
    """Return what tells later whether a tensor was written to: torch's count, or else a copy."""
    return x.clone() if x.is_inference() else x._version


def _is_unwritten(x: torch.Tensor, stamp: Any) -> bool:
    """Whether nobody wrote to a tensor since it was stamped."""
    return torch.equal(x, stamp) if isinstance(stamp, torch.Tensor) else x._version == stamp


def linear_is_torchs() -> bool:
    """Whether torch's linear layers are torch's own, and no hook sees the calls of all modules."""
    is_own = getattr(nn.Linear.forward, "__globals__", None) is vars(nn.modules.linear)
    return is_own and functional.linear is torch._C._nn.linear and not _has_global_hooks()


def is_watched() -> bool:
    """Whether a hook sees the calls of all modules, or a mode those of all functions."""
    has_modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(has_modes) or _has_global_hooks()


def _has_global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def only_multiplies(module: nn.Module) -> bool:
    """Whether a call of a module does no more than multiply by its weight."""
    return type(module) is nn.Linear and only_computes(module)


def only_computes(module: nn.Module) -> bool:
    """Whether a call of a module does no more than the forward of its class.

    This is asked in every call, since code inside a forward may hook, patch or switch anything.
    """
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
        or torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
    )


def laid(calls: list[tuple[nn.Module, Any]], users: set[object]) -> SharedChange:
    """Lay calls under modules; a module that `torch.compile` has given one keeps it."""
    attributes = [(vars(module), call) for module, call in calls]

    def put() -> None:
        for own, call in attributes:
            own.setdefault(CALL, call)

    def take_out() -> None:
        for own, call in attributes:
            if own.get(CALL) is call:
                del own[CALL]

    return SharedChange(users, put, take_out)


class StandIns:
    """What lies under modules of one model in our steps.

    Attributes:
        stand_ins: One per module, which knows it by a weak reference `module`: what is kept of a
            model must not keep the model alive.
        thread: What they share on each thread.
    """

    def __init__(self) -> None:
        self.stand_ins: list[Any] = []
        self.thread, self._users = OnThread(), set[object]()

    @contextmanager
    def laid_under(self) -> Iterator[None]:
        """Let this thread's calls of the modules go through their stand-ins."""
        calls = [(module, each) for each in self.stand_ins if (module := each.module()) is not None]
        with laid(calls, self._users):
            self.thread.depth += 1
            try:
                yield
            finally:
                self.thread.depth -= 1
                self.thread.product = NO_PRODUCT


class InputObserver:
    """Finds out in one step which layers are called, and which of them read the same input.

    Attributes:
        calls: What is to be laid under the layers for the step.
        blocks: Layers that read the same input, one after the other.
    """

    def __init__(self, layers: Iterable[nn.Linear], joins_biases: bool = False) -> None:
        """Prepare to observe.

        Args:
            layers: Those to observe.
            joins_biases: Whether layers with biases are joined too, with one another.
        """
        self.blocks: list[list[nn.Linear]] = []
        self.calls: list[tuple[nn.Module, Any]] = [
            (layer, partial(self._call, layer)) for layer in layers
        ]
        self._joins_biases = joins_biases
        self._seen: set[nn.Module] = set()
        self._input: tuple[Any, Any] = (None, None)
        self._thread = threading.get_ident()

    def _call(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = args and threading.get_ident() == self._thread
        if is_own and only_multiplies(layer):
            self._note(layer, args[0])
        return layer._call_impl(*args, **kwargs)

    def _note(self, layer: nn.Linear, x: torch.Tensor) -> None:
        """Join a layer to the ones before it where all of them read the same tensor."""
        (given, stamped), is_new = self._input, layer not in self._seen
        joins = is_new and (layer.bias is None or self._joins_biases)
        # A copy, since torch counts no write through `.data` or by a kernel of the model's.
        if joins and x is given and self._is_alike(layer) and torch.equal(x, stamped):
            self.blocks[-1].append(layer)
        elif is_new:
            self.blocks.append([layer])
        self._input = (x, x.clone()) if joins else (None, None)
        self._seen.add(layer)

    def _is_alike(self, layer: nn.Linear) -> bool:
        before = self.blocks[-1][-1]
        same_type = layer.weight.dtype == before.weight.dtype
        return same_type and (layer.bias is None) == (before.bias is None)

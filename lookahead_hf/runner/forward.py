"""State of the forward that this thread is running, and changes that forwards share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lookahead_hf.block.block import Block
from lookahead_hf.block.packed import PackedBlock

_lock = threading.RLock()


@contextmanager
def shared_change(
    users: set[object], make: Callable[[], None], undo: Callable[[], None]
) -> Iterator[None]:
    """Make a change while at least one call is inside, and undo it when the last one leaves.

    An interrupt at any line leaves things as they were found. `users`, the calls inside, are kept
    where all calls on the shared object find them. `make` and `undo` must be idempotent.
    """
    user = object()

    def leave() -> None:
        with _lock:
            users.discard(user)
            if not users:
                undo()

    try:
        try:
            with _lock:
                users.add(user)
                make()
            yield
        finally:
            leave()
    finally:
        leave()  # again: an interrupt may have broken off the first


SetOwn = Callable[[Any, str, Any], None]
"""Gives one module object an attribute of its own: the module, the name, and the attribute."""


def set_own(undo: list[Callable[[], None]], module: Any, name: str, function: Any) -> None:
    """Give one module object an attribute of its own, and add to `undo` what removes it."""
    own = vars(module)
    found = {name: own[name]} if name in own else {}

    def take_away() -> None:
        own.pop(name, None)
        own.update(found)

    undo.append(take_away)  # first, for interrupts
    own[name] = _Own(module, name, function) if callable(function) else function


class _Own:
    """Replaces a method of one object; copies and pickles of the object have the method itself.

    A streamer or another thread may copy a model in the middle of a call.
    """

    def __init__(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._module, self._name, self._function = module, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # The copied object has no attributes of its own yet, so this finds its class's method.
        return getattr, (self._module, self._name)


@dataclass(slots=True, eq=False)
class ForwardContext:
    """What the patches of a model read in one forward of ours."""

    block: Block | PackedBlock | None = None  # what the tokens of the forward see
    mixers: Mapping[int, Callable[..., Any]] = field(default_factory=dict)  # by the id of the mixer
    layers: Any = None  # the step in which an engine computes layers, in the engine's own form
    made: dict[Any, Any] = field(default_factory=dict)  # results that layers share


class _OfThread(threading.local):
    context: ForwardContext | None = None


_thread = _OfThread()


def current() -> ForwardContext | None:
    """Return the context of the forward of ours that runs on this thread, None outside of one."""
    return _thread.context


@contextmanager
def running(context: ForwardContext, device: torch.device) -> Iterator[None]:
    """Run a forward inside, without cuDNN, which plans for every length of the cache."""
    outer = _thread.context
    _thread.context = context
    try:
        if device.type == "cuda":
            with without_cudnn():
                yield
        else:
            yield
    finally:
        _thread.context = outer


_without_cudnn_users: set[object] = set()
_cudnn_before: list[bool] = []  # at most one


def without_cudnn() -> AbstractContextManager[None]:
    """Return a context that keeps cuDNN out of attention; the whole process has one switch."""

    def switch_off() -> None:
        if not _cudnn_before:
            _cudnn_before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)

    def switch_back() -> None:
        if _cudnn_before:
            torch.backends.cuda.enable_cudnn_sdp(_cudnn_before[0])
            _cudnn_before.clear()

    return shared_change(_without_cudnn_users, switch_off, switch_back)

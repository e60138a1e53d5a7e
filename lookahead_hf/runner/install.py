"""Changes to shared objects, which no interrupt can leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()


@contextmanager
def shared_change(
    users: set[object], make: Callable[[], None], undo: Callable[[], None]
) -> Iterator[None]:
    """Make a change while at least one call is inside, and undo it when the last one leaves.

    An interrupt at any line leaves things as they were found.

    Args:
        users: The calls inside, kept where all calls on the shared object find it.
        make: Applies the change.
        undo: Reverts it. Both must be idempotent.
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

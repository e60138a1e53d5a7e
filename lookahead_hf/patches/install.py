"""A change to something that several calls share, which no interrupt can leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()


class SharedChange:
    """Makes a change while at least one call is inside, and undoes it when the last one leaves.

    An interrupt at any line leaves things as they were found: both functions can be repeated, and
    leaving does no harm to a call that has not entered, or has left already.
    """

    def __init__(
        self, users: set[object], make: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Prepare to enter.

        Args:
            users: The calls that are inside, kept where all calls on the shared thing find it.
            make: Makes the change, or the rest of it.
            undo: Undoes what was made of it, possibly nothing.
        """
        self._users, self._make, self._undo = users, make, undo

    def __enter__(self) -> None:
        try:
            with _lock:
                self._users.add(self)
                self._make()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.restore()
        finally:
            self.restore()  # An interrupt may have broken off the first.

    def restore(self) -> None:
        """Leave, which may be repeated, and undo the change if nobody else is inside."""
        with _lock:
            self._users.discard(self)
            if not self._users:
                self._undo()


SetOwn = Callable[[Any, str, Any], None]
"""Gives one module object an attribute of its own: the module, the name, and the attribute."""


def set_own(undo: list[Callable[[], None]], module: Any, name: str, function: Any) -> None:
    """Give one module object an attribute of its own, and add to `undo` what undoes that."""
    own = vars(module)
    found = {name: own[name]} if name in own else {}

    def take_away() -> None:
        own.pop(name, None)
        own.update(found)

    undo.append(take_away)  # first, for interrupts
    own[name] = _Own(module, name, function) if callable(function) else function


class _Own:
    """Takes the place of a method of one object; copies and pickles of that have the method itself.

    A streamer or another thread may copy a model in the middle of a call.
    """

    def __init__(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._module, self._name, self._function = module, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # The copied object has no attributes of its own yet, so this finds its class's method.
        return getattr, (self._module, self._name)

"""Keeps a drafter object from serving two calls at once, in two threads or one inside the other."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.user_drafter import Adapted

_lock = threading.Lock()

_users: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The session that uses an object, by the object's id. Objects are never compared: `__eq__` is
their author's code, and the lock is held."""


def take(session: Any, sources: Sequence[Drafter]) -> list[Drafter]:
    """Reserve the sources for a session; warn of those that another session uses."""
    with _lock:
        free = [source for source in sources if _key(source) not in _users]
        _users.update((_key(source), session) for source in free)
    for source in sources:
        if all(source is not each for each in free):
            warnings.warn(
                f"the drafter object {source.name!r} drafts for another call at this moment and is "
                "left out of this one: an object serves one call at a time. Give every call an "
                f"object of its own, or the name {source.name!r} instead, which makes a new one "
                "for every call",
                RuntimeWarning,
                stacklevel=4,
            )
    return free


def release(sources: Sequence[Drafter]) -> None:
    with _lock:
        for source in sources:
            _users.pop(_key(source), None)


def _key(source: Drafter) -> int:
    """Return the id of the source, or of the caller's object that it wraps."""
    return id(source.adapted if isinstance(source, Adapted) else source)

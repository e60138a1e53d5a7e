"""Everything that is kept of a model between calls."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


@dataclass(eq=False)
class ModelState:
    """What calls on one model keep for later calls on it.

    Objects of other rooms are kept by their class. The state lives as long as the model, but not on
    the model: a lock or a tensor there would be copied, pickled and saved with it.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    warned: set[str] = field(default_factory=set)  # reasons for a fallback
    run_blocks: set[tuple[str, int, bool]] = field(default_factory=set)  # mode, tokens, if packed
    # Results of self tests, empty for no fault, by `Numerics` and whether blocks were packed.
    self_tests: dict[Hashable, str] = field(default_factory=dict)
    fixed_attention: set[int] | None = None  # ids of configurations whose attention must stay
    patch_users: set[object] = field(default_factory=set)  # calls in progress
    patches: list[Callable[[], None]] = field(default_factory=list)  # undo attributes of modules
    _kept: dict[type, Any] = field(default_factory=dict)

    def get(self, kind: type[T]) -> T | None:
        """Return the kept object of a class, None without one."""
        return self._kept.get(kind)

    def put(self, kept: T) -> T:
        """Keep an object in place of the one of its class."""
        self._kept[type(kept)] = kept
        return kept

    def is_first(self, warning: str) -> bool:
        """Return whether a warning is the model's first of its kind, and remember it."""
        with self.lock:
            is_first = warning not in self.warned
            self.warned.add(warning)
        return is_first

    def free(self) -> None:
        """Release every kept object with a `release`, back to the system."""
        with self.lock:
            owners = [kept for kept in self._kept.values() if hasattr(kept, "release")]
            for owner in owners:
                del self._kept[type(owner)]
        while owners:
            owners.pop().release()
        return_memory()


def return_memory() -> None:
    """Have the C library give freed memory back to the system; glibc keeps some otherwise."""
    with suppress(OSError, AttributeError, TypeError):  # another library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> ModelState:
    """Return the state of a model, made on first use."""
    with _lock:
        return _states.setdefault(model, ModelState())


def kept(model: Any, kind: type[T]) -> T:
    """Return the object of a class that is kept of a model, made on first use."""
    state = state_of(model)
    with state.lock:
        found = state.get(kind)
        return state.put(kind()) if found is None else found

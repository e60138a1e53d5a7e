"""All that is kept of a model between calls, in one place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from lookahead_hf.drafting.session import ModelMemory


@dataclass(eq=False)
class ModelState:
    """What calls on one model keep for later calls on it.

    The state lives as long as the model, and never on the model: a lock or a tensor there would be
    copied, pickled and saved with it.

    Attributes:
        lock: Held while a field is read and replaced.
        drafting: Learned acceptance rates, measured costs of steps, and the model's own pool.
        attention_users: Calls in progress that have our attention under the model's.
        position_users: Calls in progress that have replaced how the model counts positions.
        undo_positions: What puts the model's own counting back.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    drafting: ModelMemory | None = None
    attention_users: set[object] = field(default_factory=set)
    position_users: set[object] = field(default_factory=set)
    undo_positions: list[Callable[[], None]] = field(default_factory=list)

    def free(self) -> None:
        """Free what takes memory; a later call makes it anew."""


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> ModelState:
    """Return the state of a model, made when it is first asked for."""
    with _lock:
        return _states.setdefault(model, ModelState())

"""All that is kept of a model between calls, in one place."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from lookahead_hf.drafting.session import ModelMemory
    from lookahead_hf.runner.packed_linear import PackedLinears


@dataclass(eq=False)
class ModelState:
    """What calls on one model keep for later calls on it.

    The state lives as long as the model, and never on the model: a lock or a tensor there would be
    copied, pickled and saved with it.

    Attributes:
        lock: Held while a field is read and replaced.
        drafting: Learned acceptance rates, measured costs of steps, and the model's own pool.
        packed: Packed copies of the weights of linear layers, on a CPU.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    drafting: ModelMemory | None = None
    packed: PackedLinears | None = None

    def free(self) -> None:
        """Free what takes memory; a later call makes it anew."""
        with self.lock:
            self.packed = None


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> ModelState:
    """Return the state of a model, made when it is first asked for."""
    with _lock:
        return _states.setdefault(model, ModelState())

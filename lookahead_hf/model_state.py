"""All that is kept of a model between calls, in one place."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from lookahead_hf.drafting.session import ModelMemory
    from lookahead_hf.runner.cuda.graphs import ModelGraphs


@dataclass(eq=False)
class ModelState:
    """What calls on one model keep for later calls on it.

    The state lives as long as the model, and never on the model: a lock or a tensor there would be
    copied, pickled and saved with it.

    Attributes:
        lock: Held while a field is read and replaced.
        drafting: Learned acceptance rates, measured costs of steps, and the model's own pool.
        is_compiled: Whether `torch.compile` made a forward in it, as the latest call found it.
        graphs: Captured steps with their K and V.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    drafting: ModelMemory | None = None
    is_compiled: bool | None = None
    graphs: ModelGraphs | None = None

    def free(self) -> None:
        """Free what takes memory; a later call makes it anew."""
        with self.lock:
            graphs, self.graphs = self.graphs, None
        if graphs is not None:
            graphs.release()


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> ModelState:
    """Return the state of a model, made when it is first asked for."""
    with _lock:
        return _states.setdefault(model, ModelState())

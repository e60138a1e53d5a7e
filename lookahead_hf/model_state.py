"""All that is kept of a model between calls, in one place."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from lookahead_hf.drafting.memory import ModelMemory
    from lookahead_hf.model.facts import ModelFacts
    from lookahead_hf.model.numerics import Numerics
    from lookahead_hf.patches.layers import CompiledLayers
    from lookahead_hf.runner.cuda.graphs import ModelGraphs
    from lookahead_hf.stats import SpeculativeStats, Totals


@dataclass(eq=False)
class ModelState:
    """What calls on one model keep for later calls on it.

    The state lives as long as the model, and never on the model: a lock or a tensor there would be
    copied, pickled and saved with it.

    Attributes:
        facts: What the latest call has read of the model.
        lock: Held while a field is read and replaced.
        drafting: Learned acceptance rates, measured costs of steps, and the model's own pool.
        compiled: Layers that compiled kernels compute, on a CPU.
        graphs: Captured steps with their K and V, on a GPU.
        heads: Heads that draft, by the drafter's name, each with what it was loaded for.
        stats: What the latest call did, None after a plain one.
        stats_of_thread: The same of a thread's own latest call, as the attribute `stats`.
        totals: Sums over the calls so far, None before the first.
        stats_listeners: Callbacks that hear the statistics of every call.
        warned: What was warned of: reasons for a fallback, and quantised activations.
        run_blocks: Mode and tokens of the blocks that were run, and whether they were flat.
        trials: What self tests of padded (False) and of flat blocks found, empty for no fault, by
            the numerics that they were made in; and the hooks that it may be due to, None for none.
        needs_copies: The same keys, where the self test needed contiguous K and V.
        kernel_trials: Whether our kernel does all attention, by numerics.
        mask_sources: Sources of the forwards that handle masks.
        fixed_attention: Ids of configurations whose attention implementation must stay.
        patch_users: Calls in progress that have our patches under the model.
        patches: Callbacks that take away the attributes that these calls gave to modules.
        stepwise_mixers: Mixers that get a block's tokens one by one, by numerics, once tested.
    """

    facts: ModelFacts | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    drafting: ModelMemory | None = None
    compiled: CompiledLayers | None = None
    graphs: ModelGraphs | None = None
    heads: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    stats: SpeculativeStats | None = None
    stats_of_thread: threading.local = field(default_factory=threading.local)
    totals: Totals | None = None
    stats_listeners: dict[object, Callable[[SpeculativeStats], None]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    run_blocks: set[tuple[str, int, bool]] = field(default_factory=set)
    trials: dict[tuple[Numerics, bool], tuple[str, frozenset[int] | None]] = field(
        default_factory=dict
    )
    needs_copies: set[tuple[Numerics, bool]] = field(default_factory=set)
    kernel_trials: dict[Numerics, bool] = field(default_factory=dict)
    mask_sources: list[str] | None = None
    fixed_attention: set[int] | None = None
    patch_users: set[object] = field(default_factory=set)
    patches: list[Callable[[], None]] = field(default_factory=list)
    stepwise_mixers: dict[Numerics, frozenset[int]] = field(default_factory=dict)

    def is_first(self, warning: str) -> bool:
        """Return whether a warning is the model's first of its kind, and remember it."""
        with self.lock:
            is_first = warning not in self.warned
            self.warned.add(warning)
        return is_first

    def free(self) -> None:
        """Free what takes memory, back to the system; a later call makes it anew."""
        with self.lock:
            self.compiled = None
            self.heads.clear()
            graphs, self.graphs = self.graphs, None
        if graphs is not None:
            graphs.release()
        return_memory()


def return_memory() -> None:
    """Let the C library give freed memory back to the system, where it can.

    glibc keeps what was freed below its upper end.
    """
    with suppress(OSError, AttributeError, TypeError):  # another library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> ModelState:
    """Return the state of a model, made when it is first asked for."""
    with _lock:
        return _states.setdefault(model, ModelState())

"""All that is kept of a model between calls, in one place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from lookahead_hf.drafting.memory import ModelMemory
    from lookahead_hf.runner.cuda.graphs import ModelGraphs
    from lookahead_hf.runner.cuda.joined_linear import JoinedLinears
    from lookahead_hf.runner.packed_linear import PackedLinears
    from lookahead_hf.stats import SpeculativeStats, Totals


@dataclass(eq=False)
class ModelState:
    """What calls on one model keep for later calls on it.

    The state lives as long as the model, and never on the model: a lock or a tensor there would be
    copied, pickled and saved with it.

    Attributes:
        lock: Held while a field is read and replaced.
        drafting: Learned acceptance rates, measured costs of steps, and the model's own pool.
        packed: Packed copies of the weights of linear layers, on a CPU.
        joined: Linear layers of one input that are computed in one product, on a GPU.
        graphs: Captured steps with their K and V, on a GPU.
        heads: Heads that draft, by the drafter's name, each with what it was loaded for.
        stats: What the latest call did, None after a plain one.
        stats_of_thread: The same of a thread's own latest call, as the attribute `stats`.
        totals: Sums over the calls so far, None before the first.
        stats_listeners: Callbacks that hear the statistics of every call.
        warned: What was warned of: reasons for a fallback, and quantised activations.
        run_blocks: Mode and tokens of the blocks that were run, and whether they were flat.
        trials: What self tests of padded (False) and of flat blocks found, empty for no fault.
        needs_copies: Whether the self test showed that the model needs contiguous K and V.
        kernel_trial: Attention implementations, and whether our kernel does all attention there.
        mask_sources: Sources of the forwards that handle masks.
        fixed_attention: Ids of configurations whose attention implementation must stay.
        attention_users: Calls in progress that have our attention under the model's.
        own_attributes: By what they are for, the calls in progress that have given modules
            attributes of their own, and what takes these away.
        stepwise_mixers: Mixers that get a block's tokens one by one, None before the self test.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    drafting: ModelMemory | None = None
    packed: PackedLinears | None = None
    joined: JoinedLinears | None = None
    graphs: ModelGraphs | None = None
    heads: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    stats: SpeculativeStats | None = None
    stats_of_thread: threading.local = field(default_factory=threading.local)
    totals: Totals | None = None
    stats_listeners: dict[object, Callable[[SpeculativeStats], None]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    run_blocks: set[tuple[str, int, bool]] = field(default_factory=set)
    trials: dict[bool, str] = field(default_factory=dict)
    needs_copies: bool = False
    kernel_trial: tuple[tuple[str | None, ...], bool] | None = None
    mask_sources: list[str] | None = None
    fixed_attention: set[int] | None = None
    attention_users: set[object] = field(default_factory=set)
    own_attributes: dict[str, tuple[set[object], list[Callable[[], None]]]] = field(
        default_factory=dict
    )
    stepwise_mixers: frozenset[int] | None = None

    def is_first(self, warning: str) -> bool:
        """Return whether a warning is the model's first of its kind, and remember it."""
        with self.lock:
            is_first = warning not in self.warned
            self.warned.add(warning)
        return is_first

    def free(self) -> None:
        """Free what takes memory; a later call makes it anew."""
        with self.lock:
            joined, self.joined, self.packed = self.joined, None, None
            self.heads.clear()
            graphs, self.graphs = self.graphs, None
        if graphs is not None:
            graphs.release()
        if joined is not None:
            joined.take_apart()


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> ModelState:
    """Return the state of a model, made when it is first asked for."""
    with _lock:
        return _states.setdefault(model, ModelState())

"""Steps as CUDA graphs: captured once per kind of call, kept with the model, retired all together.

What a graph froze at its capture is never looked at again: adapters, training mode, the attention
implementation, every number in Python. So graphs belong to what the model was when they were
captured. Their K and V, lengths and drafts stay where they are; a later call that fits moves in.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.runner import torch_compile
from lookahead_hf.runner.cuda.capture import recorder_for
from lookahead_hf.runner.cuda.graph_set import (
    GraphSet,
    Uncapturable,
    bucket,
    bytes_per_slot,
    new_set,
)
from lookahead_hf.runner.cuda.step import StepState, only_group
from lookahead_hf.runner.guards import fingerprint, passed_over
from lookahead_hf.runner.standing import settings

_logger = logging.getLogger(__name__)

WIDTHS = (64, 32, 16, 8, 1)
"""Tokens per row of the captured steps; a draft takes the narrowest that holds it."""

WORTHWHILE = 64
"""New tokens from which on "auto" captures; that takes about a second."""

MOST_SETS = 2
"""Kinds of calls whose graphs a model keeps: greedy and sampled, for instance."""

PATIENCE = 4
"""Calls of a further kind, while one of those is not made at all, after which "auto" gives that up
for them: kinds that come in turn would be captured in every call."""

MOST_NOTED = 16
"""Calls without graphs, and kinds that could not be captured, that are remembered of a model."""

MEMORY_SHARE = 0.25
"""Part of the free memory that K and V of a model's graphs may take."""


@dataclass(eq=False)
class _Refusal:
    """A kind of call that could not be captured; an accident is given another chance, ever later.

    Attributes:
        key: The kind.
        reason: Why.
        is_lasting: As of `Uncapturable`, which itself would hold on to the call.
        pause: Calls that were to go by after the latest attempt.
        left: Those of them that are still to come.
    """

    key: tuple[Any, ...]
    reason: str
    is_lasting: bool
    pause: int = 1
    left: int = 1


class _Kept:
    """What is kept of a model between calls.

    Attributes:
        lock: Held while that changes.
        sets: Its graphs, those that were used last at the end.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sets: list[GraphSet] = []
        self._missed: deque[tuple[Any, ...]] = deque(maxlen=MOST_NOTED)
        self._refusals: deque[_Refusal] = deque(maxlen=MOST_NOTED)

    def refuse(self, key: tuple[Any, ...], error: Uncapturable) -> None:
        """Remember that such calls could not be captured."""
        known = next((each for each in self._refusals if each.key == key), None)
        if known is None:
            self._refusals.append(_Refusal(key, str(error), error.is_lasting))
            return
        known.reason, known.is_lasting = str(error), error.is_lasting
        known.left = known.pause = 2 * known.pause

    def check(self, key: tuple[Any, ...]) -> None:
        """Raise Uncapturable where such calls are not to be tried now."""
        for known in self._refusals:
            if known.key == key and (known.left or known.is_lasting):
                known.left = max(known.left - 1, 0)
                raise Uncapturable(known.reason)

    def take(self, key: tuple[Any, ...]) -> GraphSet | None:
        """The graphs of such calls, held for one; None where there are none."""
        found = next((each for each in self.sets if each.key == key), None)
        if found is None:
            return None
        if not found.in_use.acquire(blocking=False):
            raise Uncapturable("another call is using the model's graphs")
        if found is self.sets[0]:
            self._missed.clear()  # there is no kind that is not called any more
        self.sets.remove(found)
        self.sets.append(found)
        return found

    def make_way(
        self, key: tuple[Any, ...], size: int, limit: float, held: list[GraphSet], insists: bool
    ) -> None:
        """Choose the graphs that further ones take the place of.

        Args:
            key: The kind of call that they are for.
            size: Bytes of their K and V.
            limit: Bytes that K and V of all graphs may take.
            held: What is given up in any case; what else has to be is added to it, held.
            insists: Whether others are given up at once.
        """
        stay = [each for each in self.sets if each not in held]

        def is_crowded() -> bool:
            return bool(stay) and (len(stay) >= MOST_SETS or size + _nbytes(stay) > limit)

        if is_crowded() and not insists:
            self._missed.append(key)
            if self._missed.count(key) < PATIENCE:
                raise Uncapturable("the model keeps graphs of other kinds of calls")
        while is_crowded():
            idle = next((each for each in stay if each.in_use.acquire(blocking=False)), None)
            if idle is None:
                raise Uncapturable("other calls are using the model's graphs")
            held.append(idle)
            stay.remove(idle)

    def give_up(self, held: list[GraphSet]) -> None:
        """Retire graphs, and keep nothing of them: their memory is needed."""
        self._missed.clear()
        while held:
            self.sets.remove(held[-1])
            held.pop().retire()


_lock = threading.Lock()
_kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()


def enter(
    model: Any,
    cache: AdoptedCache,
    state: StepState,
    shape: tuple[Any, ...],
    slots: int,
    *,
    create: bool,
    insists: bool = False,
) -> GraphSet:
    """Move a call into a set of the model's graphs, a new one where none fits.

    The caller must call `leave` with what it gets.

    Args:
        model: The target.
        cache: The call's cache; its layers move to the set's K and V.
        state: The call's state, which the set's state copies.
        shape: What else the graphs depend on.
        slots: Slots that the call may need.
        create: Whether a set that is missing is made.
        insists: Whether it is made whatever kinds of calls the model's other graphs are for.

    Raises:
        Uncapturable: There is none for this call.
    """
    key = (fingerprint(model), settings(model), shape, *_sizes(cache, state))
    with _lock:
        kept = _kept.setdefault(model, _Kept())
    with kept.lock:
        kept.check(key)
        held = [each for each in (kept.take(key),) if each is not None]
        try:
            if not held or held[0].capacity < slots:
                if not create:
                    raise Uncapturable("the call is too short to capture for")
                _renew(kept, key, cache, state, slots, held, insists)
            held[0].move_in(cache, state)
        except BaseException:
            for each in held:
                each.in_use.release()
            raise
    return held[0]


def _renew(
    kept: _Kept,
    key: tuple[Any, ...],
    cache: AdoptedCache,
    state: StepState,
    slots: int,
    held: list[GraphSet],
    insists: bool,
) -> None:
    """Make a new set in place of `held`, what it has outgrown; afterwards it is what is held."""
    device, capacity = state.lengths.device, bucket(slots)
    recorder = recorder_for(device)
    if recorder is None:
        raise Uncapturable(f"there are no graphs on {device.type}")
    size, limit = capacity * bytes_per_slot(cache), _limit(device, kept.sets)
    if size > limit:
        raise Uncapturable(f"its K and V would take {size >> 20} MiB for good")
    kept.make_way(key, size, limit, held, insists)
    kept.give_up(held)
    try:
        made = new_set(key, cache, state, capacity, recorder)
    except RuntimeError as error:  # out of memory
        refused = Uncapturable.after(error)
        kept.refuse(key, refused)
        raise refused from error
    made.in_use.acquire()
    kept.sets.append(made)
    held.append(made)


def _limit(device: torch.device, sets: list[GraphSet]) -> float:
    """Bytes that K and V of a model's graphs may take."""
    if device.type != "cuda":
        return float("inf")
    return MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + _nbytes(sets))


def _nbytes(sets: list[GraphSet]) -> int:
    return sum(each.nbytes for each in sets)


def leave(model: Any, used: GraphSet, error: Uncapturable | None = None) -> None:
    """End a call's use of a set; where capturing failed, remember why and drop it."""
    used.recorder.end()
    with _lock:
        kept = _kept.get(model, _Kept())
    with kept.lock:
        if error is not None:
            kept.refuse(used.key, error)
            kept.sets = [each for each in kept.sets if each is not used]
            _logger.info("steps of %s are not captured: %s", type(model).__name__, error)
        if used in kept.sets:
            used.in_use.release()
            return
    used.retire()


def release(model: Any) -> None:
    """Free what is kept for a model; what a call is using, at its end."""
    with _lock:
        kept = _kept.pop(model, None)
    if kept is None:
        return
    with kept.lock:
        idle = [each for each in kept.sets if each.in_use.acquire(blocking=False)]
        kept.sets = []
    for each in idle:
        each.retire()


def _sizes(cache: AdoptedCache, state: StepState) -> tuple[Any, ...]:
    """Shapes and types of all that is copied in, but for the number of slots."""
    stores = [
        (tuple(store.shape[2:]), store.dtype, store.device)
        for layer in only_group(cache).layers
        for store in (layer.k_store, layer.v_store)
    ]
    return state.shapes(), tuple(stores)


def refusal(model: Any, device: torch.device, extras: dict[str, Any]) -> str | None:
    """What can be seen to forbid graphs before anything was tried; None if nothing.

    Args:
        model: The target.
        device: Where the call's tensors are.
        extras: What plain passes with every forward.
    """
    if recorder_for(device) is None:
        return f"there are no graphs on {device.type}"
    if any(isinstance(value, torch.Tensor) for value in extras.values()):
        return "the model is passed further tensors"
    if any("_hf_hook" in vars(module) for module in model.modules()):
        return "a hook of accelerate moves tensors"
    if torch_compile.has_own_graphs(model):
        return "the model is compiled into graphs already"
    if compat.reads_lengths(model):
        return "its rotary positions look at the length in every forward"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the call itself is being captured"
    return passed_over(model)

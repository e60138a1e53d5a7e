"""Steps as CUDA graphs: captured once per shape, kept with the model, retired all together.

What a graph froze at its capture is never looked at again: hooks, adapters, training mode, the
attention implementation. So a set of graphs belongs to a fingerprint of the model. Its K and V, its
lengths and drafts stay where they are; a later call that fits moves in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.kernels import PathTable
from lookahead_hf.target import compilation
from lookahead_hf.target.device_step import StepState, only_group
from lookahead_hf.target.graph_recorder import Recorder, Recording, Step, recorder_for

_logger = logging.getLogger(__name__)

WIDTHS = (64, 32, 16, 8, 1)
"""Tokens per row of the captured steps; a draft takes the narrowest that holds it."""

LEAST_VISIBLE = 512
"""Slots that the attention of the first graphs sees; doubled as the texts grow."""

WORTHWHILE = 64
"""New tokens from which on "auto" captures; that takes about a second."""

MEMORY_SHARE = 0.25
"""Part of the free memory that K and V of a set may take."""


def bucket(slots: int) -> int:
    """Slots in steps of a factor of two, so that few graphs serve all lengths."""
    return compilation.doubled(LEAST_VISIBLE, slots)


@dataclass(eq=False)
class GraphSet:
    """The graphs of one model and one shape of batch, with the tensors that they read and write.

    Attributes:
        key: What a call must have in common with the one that made the set.
        capacity: Slots of K and V.
        state: Lengths, positions and drafts.
        stores: K and V of every layer.
        table: What compaction knows of them.
        in_use: Held by the call that replays; two replays must not overlap.
    """

    key: tuple[Any, ...]
    capacity: int
    state: StepState
    stores: list[tuple[torch.Tensor, torch.Tensor]]
    table: PathTable
    recorder: Recorder
    recordings: dict[tuple[int, int], Recording] = field(default_factory=dict)
    in_use: threading.Lock = field(default_factory=threading.Lock)

    def visible_for(self, slots: int) -> int:
        """The slots that a graph shows where so many are in use."""
        return min(bucket(slots), self.capacity)

    def capture(self, visible: int, run: Callable[[int, int], Step], widths: list[int]) -> None:
        """Record steps of all widths, largest first, so that the smaller ones fit its memory.

        Raises:
            Uncapturable: It cannot be done.
        """
        for width in sorted(widths, reverse=True):
            if (width, visible) not in self.recordings:
                self._capture(width, visible, run)

    def _capture(self, width: int, visible: int, run: Callable[[int, int], Step]) -> None:
        """Both trial and recording write K and V behind the lengths only, which are put back."""
        lengths = self.state.lengths.clone()
        self.state.rehearse(width)

        def step() -> Step:
            self.state.lengths.copy_(lengths)
            return run(width, visible)

        try:
            reason = self.recorder.try_out(step)
            if reason is not None:
                raise Uncapturable(reason)
            self.recordings[width, visible] = self.recorder.record(lambda: run(width, visible))
        except Uncapturable:
            raise
        except Exception as error:
            first = str(error).splitlines()[:1] or [""]
            raise Uncapturable(f"{type(error).__name__}: {first[0]}") from error
        finally:
            self.state.lengths.copy_(lengths)

    def retire(self) -> None:
        """Free all graphs."""
        recordings, self.recordings = list(self.recordings.values()), {}
        if recordings:
            self.recorder.release(recordings)


class Uncapturable(Exception):
    """Steps of this model cannot be recorded; they run one operation after the other."""


_lock = threading.Lock()
_sets: WeakKeyDictionary[Any, GraphSet] = WeakKeyDictionary()
_refused: WeakKeyDictionary[Any, tuple[Any, str]] = WeakKeyDictionary()


def enter(
    model: Any,
    cache: AdoptedCache,
    state: StepState,
    shape: tuple[Any, ...],
    slots: int,
    *,
    create: bool,
) -> GraphSet:
    """Move a call into the model's set of graphs, a new one where the old one does not fit.

    The caller must call `leave` with what it gets.

    Args:
        model: The target.
        cache: The call's cache; its layers move to the set's K and V.
        state: The call's state, which the set's state copies.
        shape: What else the graphs depend on.
        slots: Slots that the call may need.
        create: Whether a set that is missing is made.

    Raises:
        Uncapturable: There is none for this call.
    """
    print_of = fingerprint(model)
    refused = _refused.get(model)
    if refused is not None and refused[0] == print_of:
        raise Uncapturable(refused[1])
    key = (print_of, shape, *_sizes(cache, state))
    with _lock:
        found = _sets.get(model)
        if found is not None and not found.in_use.acquire(blocking=False):
            raise Uncapturable("another call is using the model's graphs")
        if found is None or found.key != key or found.capacity < slots:
            if not create:
                if found is not None:
                    found.in_use.release()
                raise Uncapturable("the call is too short to capture for")
            if found is not None:
                del _sets[model]
                found.retire()
            found = _new_set(key, cache, state, slots)
            found.in_use.acquire()
            _sets[model] = found
    try:
        found.recorder.begin()
        _move_in(found, cache, state)
    except BaseException:
        found.in_use.release()
        raise
    return found


def leave(model: Any, used: GraphSet, refusal: str | None = None) -> None:
    """End a call's use of a set; where capturing failed, remember why and drop it."""
    if refusal is not None:
        _refused[model] = (fingerprint(model), refusal)
        _logger.info("steps of %s are not captured: %s", type(model).__name__, refusal)
        with _lock:
            if _sets.get(model) is used:
                del _sets[model]
        used.retire()
    used.recorder.end()
    used.in_use.release()


def release(model: Any) -> None:
    """Free what is kept for a model, unless a call is using it."""
    with _lock:
        found = _sets.get(model)
        if found is not None and found.in_use.acquire(blocking=False):
            del _sets[model]
            found.retire()


def _sizes(cache: AdoptedCache, state: StepState) -> tuple[Any, ...]:
    """Shapes and types of all that is copied in, but for the number of slots."""
    stores = [
        (tuple(store.shape[2:]), store.dtype, store.device)
        for layer in only_group(cache).layers
        for store in (layer.k_store, layer.v_store)
    ]
    return state.shapes(), tuple(stores)


def _new_set(key: tuple[Any, ...], cache: AdoptedCache, state: StepState, slots: int) -> GraphSet:
    device = state.lengths.device
    capacity = bucket(slots)
    layers = only_group(cache).layers
    per_slot = sum(store[:, 0].nbytes for la in layers for store in (la.k_store, la.v_store))
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if capacity * per_slot > MEMORY_SHARE * free:
            raise Uncapturable(f"its K and V would take {capacity * per_slot >> 20} MiB for good")
    recorder = recorder_for(device)
    if recorder is None:
        raise Uncapturable(f"there are no graphs on {device.type}")
    with torch.inference_mode(False):  # later calls write to them outside of it
        stores = [(_room(la.k_store, capacity), _room(la.v_store, capacity)) for la in layers]
        table = PathTable([store for pair in stores for store in pair])
        return GraphSet(key, capacity, state.with_room(capacity), stores, table, recorder)


def _room(store: torch.Tensor, capacity: int) -> torch.Tensor:
    shape = store.shape[0], capacity, *store.shape[2:]
    return torch.zeros(shape, dtype=store.dtype, device=store.device)


def _move_in(used: GraphSet, cache: AdoptedCache, state: StepState) -> None:
    only_group(cache).move_to(used.stores, used.capacity, used.table)
    state.fit(cache)
    used.state.copy_(state)


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
    if compilation.has_own_graphs(model):
        return "the model is compiled into graphs already"
    if compat.reads_lengths(model):
        return "its rotary positions look at the length in every forward"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the call itself is being captured"
    return None


def fingerprint(model: Any, *, around: bool = True) -> tuple[Any, ...]:
    """What a graph has frozen of a model: a later call with another one needs new graphs.

    Args:
        model: The target.
        around: Whether that includes the model's own hooks, around the whole forward.
    """
    tensors = [*model.parameters(), *model.buffers()]
    modules = [
        (
            module.training,
            id(type(module).forward),
            len(module._forward_hooks) if around or module is not model else 0,
            len(module._forward_pre_hooks) if around or module is not model else 0,
            "forward" in vars(module),
            str(vars(module).get("_active_adapter")),
            vars(module).get("_disable_adapters"),
            str(vars(module).get("merged_adapters")),
        )
        for module in model.modules()
    ]
    configs = [
        (compat.attention_name(config), getattr(config, "_experts_implementation", None))
        for config in compat.attention_configs(model)
    ]
    device = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (
        (autocast, torch.get_float32_matmul_precision()),
        hash(tuple(address for tensor in tensors for address in _addresses(tensor))),
        hash(tuple(modules)),
        tuple(configs),
    )


def _addresses(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    """Where a tensor's numbers are, those of the tensors in it where it is a wrapper of some."""
    if hasattr(tensor, "__tensor_flatten__"):  # quantised weights, for instance
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [address for each in inner for address in _addresses(each)]
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape)]

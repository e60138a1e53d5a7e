"""Captured graphs of steps: one set of a shape, and all sets of a model."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lookahead_hf.cache.slots import ColumnCache, SlotGroup
from lookahead_hf.call import execution
from lookahead_hf.engines.cuda.capture import Captured, CudaRecorder, Recording, recorder_for
from lookahead_hf.engines.cuda.step import MAX_WIDTH, StepState
from lookahead_hf.kernels.data import PathTable
from lookahead_hf.model.state import kept

LEAST_VISIBLE = 512  # Slots that the attention of the first graphs sees, doubled as the texts grow

Step = tuple[int, int, bool]
"""The width of a step, the visible slots, and whether the step decides, too."""

_capturing = threading.Lock()
"""Held while steps are captured. torch allows one capture at a time in a process, during which
nobody may wait for the whole device."""


class Uncapturable(Exception):
    """Steps cannot be captured; they run one operation after the other."""

    @classmethod
    def after(cls, error: Exception) -> Uncapturable:
        """Return an error of a capture as the reason."""
        message = (str(error).splitlines() or [""])[0]
        return cls(f"{execution.FAILED}: {type(error).__name__}: {message}")


def slots_for(group: SlotGroup, capacity: int) -> int:
    """Return the slots of a group of layers in a set for texts of `capacity` tokens.

    Layers with a window have room for it and for some blocks. When that is used up, what no later
    token sees is dropped, and the rest moves to the front.
    """
    if group.window is None:
        return capacity
    return min(capacity, group.num_kept + max(2 * MAX_WIDTH, group.num_kept // 4))


def bucket(slots: int) -> int:
    """Round a number of slots up to a power of two, so that a few graphs serve all lengths."""
    return max(LEAST_VISIBLE, 1 << (slots - 1).bit_length())


def capacity_for(slots: int) -> int:
    """Round up the slots that a call may need: by a sixteenth at most, from 8,192 on."""
    step = max(LEAST_VISIBLE, bucket(slots) // 32)
    return -(-slots // step) * step


@dataclass(eq=False)
class GraphSet:
    """The graphs of one model and one kind of call."""

    key: tuple[Any, ...]  # what calls on the set have in common
    capacity: int  # most tokens of a text
    state: StepState  # lengths, positions and drafts
    stores: list[list[tuple[torch.Tensor, torch.Tensor]]]  # K and V by groups of layers
    tables: list[PathTable]  # the same, for compaction
    recorder: CudaRecorder  # captures the steps
    recordings: dict[Step, Recording] = field(default_factory=dict)  # the captured steps
    is_used: bool = False  # whether a call replays; two replays must not overlap
    reads_masks: bool | None = None  # whether a layer reads its mask; None if unknown

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return sum(store.nbytes for group in self.stores for pair in group for store in pair)

    def visible_for(self, slots: int) -> int:
        """Return the slots that a graph shows while `slots` are in use.

        The attention kernel reads what a row holds, whatever it is shown. So one graph serves all
        lengths if no layer reads a mask.
        """
        return self.capacity if self.reads_masks is False else min(bucket(slots), self.capacity)

    def try_masks(self, run: Callable[[int, int], bool], lengths: np.ndarray) -> None:
        """Find out by a step of one token per row whether a layer reads its mask, as `run` says.

        `run` runs a step of a width, given the visible slots; `lengths` are the tokens of each row
        in the cache, [rows]. Uncapturable if the step fails.
        """
        self.state.rehearse(1, lengths)
        try:
            with _capturing, torch.inference_mode(False), torch.no_grad():
                self.reads_masks = run(1, self.capacity)
        except Exception as error:
            raise Uncapturable.after(error) from error

    def move_in(self, cache: ColumnCache, next_position: torch.Tensor) -> None:
        """Let a call go on in the set's tensors."""
        self.recorder.begin()
        for index, group in enumerate(cache.slots.each_group()):
            self.move(index, group)
        self.state.begin(cache, next_position)

    def move(self, index: int, group: SlotGroup) -> None:
        """Let a group of layers go on in the set's K and V."""
        room = slots_for(group, self.capacity)
        group.move_to(self.stores[index], room, self.tables[index])

    def capture(self, step: Step, run: Callable[[], Captured], lengths: np.ndarray) -> Recording:
        """Record a step for rows of these lengths in the pool of all graphs, or Uncapturable."""
        with _capturing:
            try:
                self._capture(step, run, lengths)
            except Uncapturable:
                raise
            except Exception as error:
                raise Uncapturable.after(error) from error
        return self.recordings[step]

    def _capture(self, step: Step, run: Callable[[], Captured], lengths: np.ndarray) -> None:
        """Try a step and record it; both write K and V only behind the lengths."""
        self.state.rehearse(step[0], lengths)
        # Tensors of inference mode, torch's random state too, cannot be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            reason = self.recorder.try_out(run)
            if reason is not None:
                raise Uncapturable(f"{execution.WAITS}: {reason}")
            self.recordings[step] = self.recorder.record(run)

    def retire(self) -> None:
        """Free all graphs, K and V."""
        self.stores, self.tables = [], []
        recordings, self.recordings = list(self.recordings.values()), {}
        if recordings:
            with _capturing:
                self.recorder.release(recordings)


def num_bytes(cache: ColumnCache, capacity: int) -> int:
    """Return the bytes of K and V of a set with room for `capacity` tokens."""
    return sum(
        slots_for(group, capacity) * store[:, 0].nbytes
        for group in cache.slots.each_group()
        for store in group.stores
    )


def new_set(
    key: tuple[Any, ...],
    cache: ColumnCache,
    next_position: torch.Tensor,
    capacity: int,
    recorder: CudaRecorder,
) -> GraphSet:
    """Return a set without graphs for calls like this one; Uncapturable without enough memory."""
    groups = cache.slots.each_group()
    rooms = [slots_for(group, capacity) for group in groups]
    try:
        with torch.inference_mode(False):  # later calls write to them outside of it
            stores = [
                [(_zeros(la.k_store, room), _zeros(la.v_store, room)) for la in group.layers]
                for group, room in zip(groups, rooms, strict=True)
            ]
            tables = [PathTable([store for pair in part for store in pair]) for part in stores]
            state = StepState(cache, next_position)
            return GraphSet(key, capacity, state, stores, tables, recorder)
    except RuntimeError as error:
        raise Uncapturable.after(error) from error


def _zeros(store: torch.Tensor, capacity: int) -> torch.Tensor:
    shape = store.shape[0], capacity, *store.shape[2:]
    return torch.zeros(shape, dtype=store.dtype, device=store.device)


_logger = logging.getLogger(__name__)

WIDTHS = (64, 32, 16, 8, 1)
"""Tokens per row of the captured steps; a draft takes the narrowest width that holds it."""

MOST_TOKENS = 512
"""Most tokens of a captured step. Larger ones are bound by arithmetic, so that no draft pays."""

WORTHWHILE = 64  # New tokens from which on "auto" captures graphs
MOST_SETS = 2  # Kinds of calls whose graphs a model keeps, such as greedy and sampled
MEMORY_SHARE = 0.5  # Share of the free memory that K and V of a model's graphs may take


class ModelGraphs:
    """All graphs of one model, in one set for each kind of call."""

    def __init__(self) -> None:
        self.sets: list[GraphSet] = []  # the least recently used first
        self._lock = threading.Lock()
        self._failed: dict[tuple[Any, ...], str] = {}  # why calls of a kind run without graphs

    def enter(
        self,
        kind: tuple[Any, ...],
        cache: ColumnCache,
        next_position: torch.Tensor,
        slots: int,
        create: bool,
    ) -> GraphSet:
        """Move a call into the set of its kind; Uncapturable if there is none for it.

        The caller passes the set to `leave` when the call ends. `kind` is what graphs of the call
        depend on, beside the shapes of its tensors; `slots` the most that it may need. With
        `create` a missing set is made.
        """
        key = (*kind, *_sizes(cache, next_position))
        recorder = recorder_for(next_position.device)
        if recorder is None:
            raise Uncapturable(execution.NO_GRAPHS)
        with self._lock:
            if key in self._failed:
                raise Uncapturable(self._failed[key])
            found = next((each for each in self.sets if each.key == key), None)
            if found is not None and found.is_used:
                raise Uncapturable(execution.IN_USE)
            if found is None or found.capacity < slots:
                if not create:
                    raise Uncapturable(execution.TOO_SHORT)
                self._make_way(found, cache, next_position.device, slots)
                try:
                    found = new_set(key, cache, next_position, capacity_for(slots), recorder)
                except Uncapturable as error:
                    self._failed[key] = str(error)
                    raise
            else:
                self.sets.remove(found)
            self.sets.append(found)
            found.move_in(cache, next_position)
            found.is_used = True
            return found

    def _make_way(
        self, outgrown: GraphSet | None, cache: ColumnCache, device: torch.device, slots: int
    ) -> None:
        """Retire the set that is outgrown, and the least recently used ones until there is room."""
        size = num_bytes(cache, capacity_for(slots))
        limit = _limit(device, self.sets)
        if size > limit:
            raise Uncapturable(f"{execution.TOO_LARGE}: {size >> 20} MiB")
        stay = [each for each in self.sets if each is not outgrown]
        while stay and (len(stay) >= MOST_SETS or size + _nbytes(stay) > limit):
            idle = next((each for each in stay if not each.is_used), None)
            if idle is None:
                raise Uncapturable(execution.IN_USE)
            stay.remove(idle)
        retired, self.sets = [each for each in self.sets if each not in stay], stay
        for each in retired:
            each.retire()

    def leave(self, used: GraphSet, error: Uncapturable | None = None) -> None:
        """End a call's use of a set; with an error, remember it and drop the set."""
        used.recorder.end()
        with self._lock:
            used.is_used = False
            if error is not None:
                self._failed[used.key] = str(error)
                self.sets = [each for each in self.sets if each is not used]
            stays = used in self.sets
        if error is not None:
            _logger.info("steps are not captured: %s", error)
        if not stays:
            used.retire()

    def release(self) -> None:
        """Free all sets, also the ones in use once their calls end, and forget what failed."""
        with self._lock:
            idle = [each for each in self.sets if not each.is_used]
            self.sets, self._failed = [], {}
        for each in idle:
            each.retire()


def widths_for(num_rows: int) -> tuple[int, ...]:
    """Return the tokens per row of a batch's captured steps, the most first."""
    return tuple(width for width in WIDTHS if width == 1 or width * num_rows <= MOST_TOKENS)


def graphs_of(model: Any) -> ModelGraphs:
    """Return the graphs of a model."""
    return kept(model, ModelGraphs)


def _limit(device: torch.device, sets: list[GraphSet]) -> float:
    """Return the bytes that K and V of graphs may take; memory that torch holds unused is free."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + cached + _nbytes(sets))


def _nbytes(sets: list[GraphSet]) -> int:
    return sum(each.nbytes for each in sets)


def _sizes(cache: ColumnCache, next_position: torch.Tensor) -> tuple[Any, ...]:
    groups = cache.slots.each_group()
    windows = [(group.window, group.num_kept, len(group.stores)) for group in groups]
    stores = [store for group in groups for store in group.stores]
    shapes = ((tuple(each.shape[2:]), each.dtype, each.device) for each in stores)
    positions = tuple(next_position.shape), next_position.dtype, next_position.device
    return positions, *windows, *shapes

"""The graphs of a model: which ones it keeps, and which call uses which.

A capture freezes adapters, training mode, the attention implementation and every number in Python.
So a set of graphs belongs to one state of the model and to calls of one kind. Its K and V, and the
drafts, keep their addresses, and a later call of that kind moves in.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import torch

from lookahead_hf.cache.columns import ColumnCache
from lookahead_hf.call import execution
from lookahead_hf.model_state import kept
from lookahead_hf.runner.cuda.capture import recorder_for
from lookahead_hf.runner.cuda.graph_set import (
    GraphSet,
    Uncapturable,
    capacity_for,
    new_set,
    num_bytes,
)
from lookahead_hf.runner.cuda.state import StepState

_logger = logging.getLogger(__name__)

WIDTHS = (64, 32, 16, 8, 1)
"""Tokens per row of the captured steps; a draft takes the narrowest width that holds it."""

NARROW_WIDTHS = (4, 2)
"""Further widths for many rows, where few nodes per row are worth their time."""

MANY_ROWS = 8
"""Rows from which on there are narrow widths."""

MOST_TOKENS = 512
"""Most tokens of a captured step. Larger ones are bound by arithmetic, so that no draft pays."""

WORTHWHILE = 64
"""New tokens from which on "auto" captures graphs."""

MOST_SETS = 2
"""Kinds of calls whose graphs a model keeps, such as greedy and sampled."""

RETRY_AFTER = 16
"""Calls of a kind that run without graphs after a failed capture."""

MOST_NOTED = 16
"""Kinds of calls of which a model remembers why they could not be captured."""

MEMORY_SHARE = 0.5
"""Share of the free memory that K and V of a model's graphs may take."""


class ModelGraphs:
    """All graphs of one model, in one set for each kind of call."""

    def __init__(self) -> None:
        self.sets: list[GraphSet] = []  # the least recently used first
        self._lock = threading.Lock()
        self._failed: dict[tuple[Any, ...], tuple[str, int]] = {}  # why, and calls to let pass

    def enter(
        self, kind: tuple[Any, ...], cache: ColumnCache, state: StepState, slots: int, create: bool
    ) -> GraphSet:
        """Move a call into the set of its kind, a new one where none fits.

        The caller passes the set to `leave` when the call ends.

        Args:
            kind: What graphs of the call depend on, beside the shapes of its tensors.
            cache: The call's cache; its layers move to the set's K and V.
            state: The call's state, which the set's state copies.
            slots: Most slots that the call may need.
            create: Whether to make a missing set.

        Raises:
            Uncapturable: There is no set for this call.
        """
        key = (*kind, *_sizes(cache, state))
        recorder = recorder_for(state.pads.device)
        if recorder is None:
            raise Uncapturable(execution.NO_GRAPHS)
        with self._lock:
            reason, left = self._failed.pop(key, ("", 0))
            if left:
                self._failed[key] = reason, left - 1
                raise Uncapturable(reason)
            found = next((each for each in self.sets if each.key == key), None)
            if found is not None and found.is_used:
                raise Uncapturable(execution.IN_USE)
            if found is None or found.capacity < slots:
                if not create:
                    raise Uncapturable(execution.TOO_SHORT)
                self._make_way(found, cache, state, slots)
                try:
                    found = new_set(key, cache, state, capacity_for(slots), recorder)
                except Uncapturable as error:
                    self._note(key, error)
                    raise
            else:
                self.sets.remove(found)
            self.sets.append(found)
            found.move_in(cache, state)
            found.is_used = True
            return found

    def _make_way(
        self, outgrown: GraphSet | None, cache: ColumnCache, state: StepState, slots: int
    ) -> None:
        """Retire the set that is outgrown, and the least recently used ones until there is room."""
        size = num_bytes(cache, capacity_for(slots))
        limit = _limit(state.pads.device, self.sets)
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

    def _note(self, key: tuple[Any, ...], error: Uncapturable) -> None:
        """Remember why a kind could not be captured, and forget the oldest one of many."""
        self._failed[key] = str(error), RETRY_AFTER
        if len(self._failed) > MOST_NOTED:
            del self._failed[next(iter(self._failed))]

    def leave(self, used: GraphSet, error: Uncapturable | None = None) -> None:
        """End a call's use of a set; with an error, remember it and drop the set."""
        used.recorder.end()
        with self._lock:
            used.is_used = False
            if error is not None:
                self._note(used.key, error)
                self.sets = [each for each in self.sets if each is not used]
            stays = used in self.sets
        if error is not None:
            _logger.info("steps are not captured: %s", error)
        if not stays:
            used.retire()

    def release(self) -> None:
        """Free all sets, those in use when their calls end."""
        with self._lock:
            idle = [each for each in self.sets if not each.is_used]
            self.sets = []
        for each in idle:
            each.retire()


def widths_for(num_rows: int) -> tuple[int, ...]:
    """Return the tokens per row of a batch's captured steps, the most first."""
    narrow = NARROW_WIDTHS if num_rows >= MANY_ROWS else ()
    chosen = sorted({*WIDTHS, *narrow}, reverse=True)
    return tuple(width for width in chosen if width == 1 or width * num_rows <= MOST_TOKENS)


def of_model(model: Any) -> ModelGraphs:
    """Return the graphs of a model."""
    return kept(model, ModelGraphs, ModelGraphs)


def _limit(device: torch.device, sets: list[GraphSet]) -> float:
    """Return the bytes that K and V of graphs may take; memory that torch holds unused is free."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + cached + _nbytes(sets))


def _nbytes(sets: list[GraphSet]) -> int:
    return sum(each.nbytes for each in sets)


def _sizes(cache: ColumnCache, state: StepState) -> tuple[Any, ...]:
    """Return shapes and types of all tensors that move in, but for the number of slots."""
    groups = cache.slots.each_group()
    windows = [(group.window, group.num_kept, len(group.stores)) for group in groups]
    stores = [store for group in groups for store in group.stores]
    shapes = ((tuple(each.shape[2:]), each.dtype, each.device) for each in stores)
    return state.shapes(), *windows, *shapes

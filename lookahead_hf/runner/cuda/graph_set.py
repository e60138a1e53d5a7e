"""The graphs of one kind of call, with the tensors that they read and write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.kernels import PathTable
from lookahead_hf.runner import execution, torch_compile
from lookahead_hf.runner.cuda.capture import Captured, CudaRecorder, Recording
from lookahead_hf.runner.cuda.step import StepState, only_group

LEAST_VISIBLE = 512
"""Slots that the attention of the first graphs sees; doubled as the texts grow."""

Run = Callable[[int, int], Captured]
"""A step, given its width and the visible slots."""

_capturing = threading.Lock()
"""Held while steps are captured: torch allows one capture at a time in a process, and nobody may
wait for the whole device meanwhile."""


class Uncapturable(Exception):
    """Steps cannot be captured; they run one operation after the other."""

    @classmethod
    def after(cls, error: Exception) -> Uncapturable:
        """Return the reason that an error is."""
        message = (str(error).splitlines() or [""])[0]
        return cls(f"{execution.FAILED}: {type(error).__name__}: {message}")


def bucket(slots: int) -> int:
    """Round a number of slots up to a power of two, so that few graphs serve all lengths."""
    return torch_compile.doubled(LEAST_VISIBLE, slots)


@dataclass(eq=False)
class GraphSet:
    """The graphs of one model and one kind of call.

    Attributes:
        key: What a call must have in common with the one that made the set.
        capacity: Slots of K and V.
        state: Lengths, positions and drafts.
        stores: K and V of every layer.
        table: K and V as compaction takes them.
        recorder: Captures the steps.
        recordings: The captured steps by width and visible slots.
        is_used: Whether a call replays; two replays must not overlap.
        reads_masks: Whether a layer reads its mask; None as long as nobody knows.
    """

    key: tuple[Any, ...]
    capacity: int
    state: StepState
    stores: list[tuple[torch.Tensor, torch.Tensor]]
    table: PathTable
    recorder: CudaRecorder
    recordings: dict[tuple[int, int], Recording] = field(default_factory=dict)
    is_used: bool = False
    reads_masks: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return sum(store.nbytes for pair in self.stores for store in pair)

    def visible_for(self, slots: int) -> int:
        """Return the slots that a graph shows where so many are in use.

        Our kernel reads what a row holds, whatever it is shown. So where it does all attention, and
        no layer reads a mask, one graph serves all lengths.
        """
        return self.capacity if self.reads_masks is False else min(bucket(slots), self.capacity)

    def try_masks(self, run: Callable[[int, int], bool]) -> None:
        """Find out by a step of one token per row whether a layer reads its mask.

        Args:
            run: Runs a step of a width over visible slots; returns whether a layer read a mask.

        Raises:
            Uncapturable: The step fails.
        """
        self.state.rehearse(1)
        try:
            with _capturing, torch.inference_mode(False), torch.no_grad():
                self.reads_masks = run(1, self.capacity)
        except Exception as error:
            raise Uncapturable.after(error) from error

    def move_in(self, cache: AdoptedCache, state: StepState) -> None:
        """Let a call go on in the set's tensors."""
        self.recorder.begin()
        only_group(cache).move_to(self.stores, self.capacity, self.table)
        state.fit(cache)
        self.state.copy_(state)

    def capture(self, visible: int, run: Run, widths: list[int]) -> None:
        """Record steps of all widths, the largest first, into whose memory the others then fit.

        Args:
            visible: Slots that the attention sees.
            run: The step.
            widths: Tokens per row.

        Raises:
            Uncapturable: A step cannot be captured.
        """
        with _capturing:
            try:
                for width in sorted(widths, reverse=True):
                    if (width, visible) not in self.recordings:
                        self._capture(width, visible, run)
            except Uncapturable:
                raise
            except Exception as error:
                raise Uncapturable.after(error) from error

    def _capture(self, width: int, visible: int, run: Run) -> None:
        """Try a step and record it; both write K and V behind the lengths only."""
        lengths = self.state.lengths.clone()
        self.state.rehearse(width)

        def step() -> Captured:
            self.state.lengths.copy_(lengths)
            return run(width, visible)

        try:
            # What is made in inference mode, torch's random state too, is of no use outside of it.
            with torch.inference_mode(False), torch.no_grad():
                reason = self.recorder.try_out(step)
                if reason is not None:
                    raise Uncapturable(f"{execution.WAITS}: {reason}")
                self.recordings[width, visible] = self.recorder.record(lambda: run(width, visible))
        finally:
            self.state.lengths.copy_(lengths)

    def retire(self) -> None:
        """Free all graphs, K and V."""
        self.stores, self.table = [], PathTable([])
        recordings, self.recordings = list(self.recordings.values()), {}
        if recordings:
            with _capturing:
                self.recorder.release(recordings)


def bytes_per_slot(cache: AdoptedCache) -> int:
    """Return the bytes of one slot in K and V of all layers and rows."""
    return sum(store[:, 0].nbytes for store in only_group(cache).stores)


def new_set(
    key: tuple[Any, ...],
    cache: AdoptedCache,
    state: StepState,
    capacity: int,
    recorder: CudaRecorder,
) -> GraphSet:
    """Return a set without graphs for calls like this one, with room for so many slots.

    Raises:
        Uncapturable: There is not enough memory.
    """
    layers = only_group(cache).layers
    try:
        with torch.inference_mode(False):  # later calls write to them outside of it
            stores = [(_room(la.k_store, capacity), _room(la.v_store, capacity)) for la in layers]
            table = PathTable([store for pair in stores for store in pair])
            return GraphSet(key, capacity, state.with_room(capacity), stores, table, recorder)
    except RuntimeError as error:
        raise Uncapturable.after(error) from error


def _room(store: torch.Tensor, capacity: int) -> torch.Tensor:
    shape = store.shape[0], capacity, *store.shape[2:]
    return torch.zeros(shape, dtype=store.dtype, device=store.device)

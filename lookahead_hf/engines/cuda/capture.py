"""Captures steps as CUDA graphs, which repeat them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lookahead_hf.model import compat

Captured = tuple[Any, ...]
"""The tensors that a captured step returns; its next replay overwrites them."""


@dataclass(slots=True)
class Recording:
    """A captured step, which can be repeated on the present content of its inputs."""

    graph: Any
    outputs: Captured

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Captures steps on a stream of its own; all its graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: Any = None  # the event behind a call's last use

    @cached_property
    def _stream(self) -> Any:
        """A stream that no other living recorder has.

        cuBLAS keeps a workspace per stream, whose address the graphs freeze, and frees it when a
        graph of the stream is reset. torch itself hands out the same 32 streams in turn.
        """
        with _lock:
            free = _free_streams.setdefault(self._device, [])
            if not free:
                return torch.cuda.Stream(self._device)
            # The stream's workspace is in the pool of graphs that are gone.
            compat.forget_cublas_workspaces()
            return free.pop()

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        if "_stream" in vars(self):
            _free_streams.setdefault(self._device, []).append(self._stream)

    def begin(self) -> None:
        """Wait for an earlier call's work on the same tensors, perhaps on another stream."""
        if self._used is not None:
            torch.cuda.current_stream(self._device).wait_event(self._used)

    def end(self) -> None:
        """Note that the call has launched all its work on the tensors."""
        self._used = torch.cuda.current_stream(self._device).record_event()

    def try_out(self, run: Callable[[], Captured]) -> str | None:
        """Run twice as `record` will; return the first operation that waits for the device.

        The first run may wait, as it compiles kernels. Both stay on the caller's stream, so that
        cuBLAS takes the workspace for the stream of the graphs while they are captured, out of
        their own memory: anybody may free the workspaces of other streams, as torch's inductor
        does.
        """
        run()
        with _noting_waits() as waits:
            run()
        return waits[0] if waits else None

    def record(self, run: Callable[[], Captured]) -> Recording:
        """Run once and keep the operations."""
        try:
            return self._capture(run, self._pool)
        except BaseException:
            self._end_failed_capture()
            raise

    def _end_failed_capture(self) -> None:
        """Bring torch back to where draws and allocations work.

        Up to 2.12 a failed capture leaves torch's random generator and allocator as within it:
        every later draw in the process raises. A capture that succeeds brings the generator back.
        """
        global _is_broken
        index = self._device.index or 0
        with suppress(Exception):  # raises where torch has ended it
            compat.end_allocations_to_pool(index, self._pool)
        try:
            nothing = torch.zeros((), device=self._device)
            self._capture(lambda: (nothing + 1,), torch.cuda.graph_pool_handle())
            generator = torch.cuda.default_generators[index]
            state = generator.get_state()
            torch.rand((), device=self._device)
            generator.set_state(state)
        except Exception:
            _is_broken = True
            warnings.warn(
                "a CUDA graph could not be captured, and torch's random generator does not work "
                "since then: start a new process before you sample. Pass cuda_graphs=False there",
                RuntimeWarning,
                stacklevel=2,
            )

    def _capture(self, run: Callable[[], Captured], pool: Any) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # torch's own context leaves its stream current if ending a capture fails.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = run()
        return Recording(graph, outputs)

    def release(self, recordings: list[Recording]) -> None:
        """Free all recordings, after the last replay of any."""
        # All at once: a reset frees workspaces that other graphs of the stream still use. cuBLAS's
        # own workspace stays, since it can only be freed together with those of all streams.
        torch.cuda.synchronize(self._device)
        for recording in recordings:
            recording.graph.reset()


_lock = threading.Lock()
_free_streams: dict[torch.device, list[Any]] = {}
_is_broken = False  # draws raise since a capture failed, so that nothing more is captured

_WAIT = "called a synchronizing"
_OF_MODE = (_WAIT, "Synchronization debug mode")
"""Warnings of torch while the mode is on; the second one, about the mode, comes once."""


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """Yield the first lines of torch's warnings that this thread waits for the device.

    torch's mode and Python's display of warnings belong to the process. So the mode is "warn", not
    "error", and the waits of other threads are swallowed, while their other warnings are shown.
    """
    waits: list[str] = []
    own, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if not any(part in text for part in _OF_MODE):
            show(message, *args, **kwargs)
        elif threading.get_ident() == own and _WAIT in text:
            waits.append(text.splitlines()[0])

    with warnings.catch_warnings():
        for part in _OF_MODE:
            warnings.filterwarnings("always", message=f".*{part}")
        show, warnings.showwarning = warnings.showwarning, note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)


def recorder_for(device: torch.device) -> CudaRecorder | None:
    """Return what captures steps, if anything can: ROCm sets itself up for each stream."""
    can_capture = device.type == "cuda" and not torch.version.hip and not _is_broken
    return CudaRecorder(device) if can_capture else None

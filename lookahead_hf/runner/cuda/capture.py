"""What records a step so that it can be repeated: CUDA graphs, and where they cannot be."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

Step = tuple[torch.Tensor, ...]
"""What a captured step returns, in tensors that its next replay overwrites."""


class Recording(Protocol):
    """A step that can be repeated."""

    outputs: Step

    def replay(self) -> None:
        """Run the step again, from the present content of what it reads."""


class Recorder(Protocol):
    """Records steps whose tensors share one pool of memory."""

    def begin(self) -> None:
        """A call is about to use the tensors that earlier ones used, perhaps on other streams."""

    def end(self) -> None:
        """A call has asked for all that it wants of them."""

    def try_out(self, run: Callable[[], Step]) -> str | None:
        """Run once as the recording will; returns what forbids recording, None if nothing does."""

    def record(self, run: Callable[[], Step]) -> Recording:
        """Run once and keep what was done."""

    def release(self, recordings: list[Recording]) -> None:
        """Free all recordings, after the last replay of any."""


@dataclass(slots=True)
class CudaRecording:
    """A captured CUDA graph."""

    graph: Any
    outputs: Step

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Captures on a stream of its own; all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: Any = None  # the event behind a call's last use

    @cached_property
    def _stream(self) -> Any:
        """A stream that no other living recorder has.

        cuBLAS keeps a workspace per stream, whose address is in the graphs, and lets go of it when
        a graph of the stream is reset. torch hands out 32 streams, in turn.
        """
        with _lock:
            free = _free_streams.setdefault(self._device, [])
            return free.pop() if free else torch.cuda.Stream(self._device)

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        if "_stream" in vars(self):
            _free_streams[self._device].append(self._stream)

    def begin(self) -> None:
        if self._used is not None:
            torch.cuda.current_stream(self._device).wait_event(self._used)

    def end(self) -> None:
        self._used = torch.cuda.current_stream(self._device).record_event()

    def try_out(self, run: Callable[[], Step]) -> str | None:
        """Warm up on the stream of the capture, and look for what waits for the device.

        What is done once (compiling kernels, first copies) may wait. "warn" rather than "error":
        the setting holds for the whole process, and other threads may wait as they please.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                run()
                with _noting_waits() as waits:
                    run()
        finally:
            current.wait_stream(self._stream)
        return waits[0] if waits else None

    def record(self, run: Callable[[], Step]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # torch's own context leaves the stream current where ending a capture fails.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = run()
        return CudaRecording(graph, outputs)

    def release(self, recordings: list[Recording]) -> None:
        # One after the other while others live would free workspaces that those still use. What
        # cuBLAS keeps for the stream stays: to free it means to free that of all graphs there are.
        torch.cuda.synchronize(self._device)
        for recording in recordings:
            assert isinstance(recording, CudaRecording)
            recording.graph.reset()


_lock = threading.Lock()
_free_streams: dict[torch.device, list[Any]] = {}


_WAIT = "called a synchronizing"
_OF_MODE = (_WAIT, "Synchronization debug mode")
"""What torch says while the mode is on; the second once, of the mode itself."""


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """What torch says, one line each, of operations of this thread that wait for the device.

    Both torch's mode and Python's way of showing warnings are the process's: what other threads
    wait for is not shown meanwhile, as it would not be without the mode; all else is.
    """
    waits: list[str] = []
    own, is_over = threading.get_ident(), False
    before = torch.cuda.get_sync_debug_mode()

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        # Another thread may put this back in place later, when its own `catch_warnings` ends.
        if is_over or not any(part in text for part in _OF_MODE):
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
            is_over = True


def recorder_for(device: torch.device) -> Recorder | None:
    """What records steps on this device; None where nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None

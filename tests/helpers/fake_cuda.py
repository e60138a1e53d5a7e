"""torch.cuda on a machine without one, as far as the library's recorder uses it.

A graph is a tape. A capture that fails leaves what torch up to 2.12 leaves: the random generator
and the memory pool as they are within a capture, and the stream of the capture current.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lookahead_hf.engines.cuda import capture, graphs
from lookahead_hf.engines.cuda.capture import CudaRecorder
from tests.helpers.device import Tape, on_device

SAID_ONCE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all "
    "synchronizing operations (Triggered internally at Module.cpp)"
)


class Stream:
    """A stream without work."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> object:
        return object()


class Graph:
    """A CUDAGraph; `workspace` tells whose memory cuBLAS had for its stream at the capture."""

    def __init__(self) -> None:
        self.tape: Any = None
        self.workspace: Any = None

    def replay(self) -> None:
        self.tape.replay()

    def reset(self) -> None:
        self.tape = None


class Cuda:
    """The state of the device and of the process."""

    def __init__(self) -> None:
        self.stream = self.first = Stream()
        self.modes: list[int] = [0]
        self.pools = itertools.count()
        self.recording_to: set[Any] = set()
        self.within: Any = None  # the pool of the capture in progress
        self.generator_captures = False
        self.mends = True  # whether a capture that succeeds brings the generator back
        self.workspaces: dict[Stream, Any] = {}

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def set_mode(self, mode: int | str) -> None:
        self.modes.append({"warn": 1}.get(str(mode), mode))  # type: ignore[arg-type]
        warnings.warn(SAID_ONCE, stacklevel=1)

    @contextmanager
    def graph(
        self, graph: Graph, pool: Any, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        if pool in self.recording_to:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
        self.recording_to.add(pool)
        self.stream, self.within, self.generator_captures = stream, pool, True
        try:
            with Tape() as graph.tape:
                yield
        except BaseException as error:
            self.within = None
            raise RuntimeError("operation failed due to a previous error in a capture") from error
        self.recording_to.remove(pool)
        self.within, self.generator_captures = None, not self.mends and self.generator_captures
        graph.workspace = self.workspaces.get(stream)

    def end_allocation(self, index: int, pool: Any) -> None:
        if pool not in self.recording_to:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording_to.remove(pool)

    def multiply(self) -> None:
        """Let cuBLAS take the workspace of the current stream, if it has none."""
        self.workspaces.setdefault(self.stream, "ordinary" if self.within is None else self.within)

    def drawing(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if self.generator_captures and self.within is None:
                raise RuntimeError("Offset increment outside graph capture encountered.")
            return draw(*args, **kwargs)

        return drawn


def put_in_place(patch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": fake.graph,
        "graph_pool_handle": lambda: next(fake.pools),
        "default_generators": [torch.default_generator],
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: fake.stream,
        "stream": fake.on,
        "get_sync_debug_mode": lambda: fake.modes[-1],
        "set_sync_debug_mode": fake.set_mode,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocation)
    patch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: fake.workspaces.clear(), raising=False
    )
    for holder, name in ((torch, "rand"), (torch, "multinomial"), (torch.Tensor, "exponential_")):
        patch.setattr(holder, name, fake.drawing(getattr(holder, name)))
    patch.setattr(capture, "_free_streams", {})
    patch.setattr(capture, "_is_broken", False)
    return fake


@contextmanager
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Verify calls on the CPU as on CUDA, with the library's own recorder."""
    with on_device(monkeypatch), monkeypatch.context() as patch:
        fake = put_in_place(patch)
        recorder: Callable[[Any], Any] = lambda device: (  # noqa: E731
            None if capture._is_broken else CudaRecorder(device)
        )
        patch.setattr(graphs, "recorder_for", recorder)
        yield fake

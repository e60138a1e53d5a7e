"""Captures on CUDA, with stand-ins for the functions of torch that need a GPU."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lookahead_hf.runner.cuda import capture
from lookahead_hf.runner.cuda.capture import CudaRecorder

WAIT = "called a synchronizing CUDA operation (Triggered internally)\nmore"
SAID_ONCE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all "
    "synchronizing operations (Triggered internally at Module.cpp)"
)


class Stream:
    """A stream without work; `waited` lists the streams that it waited for."""

    def __init__(self, *_: Any) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Cuda:
    """What the recorder asks of torch: the current stream, and the mode that warns of waits."""

    def __init__(self) -> None:
        self.stream = self.first = Stream()
        self.modes: list[int] = [0]

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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake, patch = Cuda(), monkeypatch.setattr
    patch(torch.cuda, "Stream", Stream)
    patch(torch.cuda, "current_stream", lambda *_: fake.stream)
    patch(torch.cuda, "stream", fake.on)
    patch(torch.cuda, "get_sync_debug_mode", lambda: fake.modes[-1])
    patch(torch.cuda, "set_sync_debug_mode", fake.set_mode)
    patch(capture, "_free_streams", {})
    return fake


DEVICE = torch.device("cuda", 0)


def fails() -> Any:
    raise RuntimeError("out of memory")


def test_after_a_trial_that_fails_the_thread_waits_for_what_was_begun(cuda: Cuda) -> None:
    recorder = CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError, match="out of memory"):
        recorder.try_out(fails)
    assert cuda.stream is cuda.first
    assert cuda.first.waited == [recorder._stream]
    assert cuda.modes[-1] == 0


def says(*messages: str) -> Callable[[], tuple[torch.Tensor, ...]]:
    def run() -> tuple[torch.Tensor, ...]:
        for message in messages:
            warnings.warn(message, stacklevel=1)
        return ()

    return run


def test_only_a_wait_is_heard_as_one(cuda: Cuda) -> None:
    recorder = CudaRecorder(DEVICE)
    with pytest.warns(UserWarning, match="deprecated") as shown:
        assert recorder.try_out(says("something deprecated")) is None
        runs = iter([says("something deprecated"), says(WAIT)])
        assert recorder.try_out(lambda: next(runs)()) == (
            "called a synchronizing CUDA operation (Triggered internally)"
        )
    assert [str(each.message) for each in shown] == ["something deprecated"] * 3
    assert cuda.modes == [0, 1, 0, 1, 0]


def test_what_other_threads_wait_for_does_not_count(cuda: Cuda) -> None:
    recorder, runs = CudaRecorder(DEVICE), []

    def run() -> tuple[torch.Tensor, ...]:
        thread = threading.Thread(target=says(*[WAIT] * len(runs), "something deprecated"))
        thread.start()
        thread.join()
        runs.append(1)
        return ()

    with pytest.warns(UserWarning, match="deprecated"):
        assert recorder.try_out(run) is None


def test_living_recorders_share_no_stream(cuda: Cuda) -> None:
    first, second, idle = (CudaRecorder(DEVICE) for _ in range(3))
    kept = first._stream
    assert first._stream is kept is not second._stream
    del first, idle
    gc.collect()
    assert CudaRecorder(DEVICE)._stream is kept

"""Captures on CUDA, with stand-ins for the functions of torch that need a GPU."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lookahead_hf.runner.cuda import capture
from lookahead_hf.runner.cuda.capture import CudaRecorder, _noting_waits

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


class Graph:
    """A graph whose capture cannot be ended."""

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


class On:
    """Makes a stream current until the context is left, but not if it is dropped."""

    def __init__(self, cuda: Cuda, stream: Stream) -> None:
        self.cuda, self.stream = cuda, stream

    def __enter__(self) -> None:
        self.before, self.cuda.stream = self.cuda.stream, self.stream

    def __exit__(self, *_: object) -> None:
        self.cuda.stream = self.before


class Cuda:
    """What the recorder asks of torch: the current stream, and the mode that warns of waits."""

    def __init__(self) -> None:
        self.stream = self.first = Stream()
        self.modes: list[int] = [0]

    def set_mode(self, mode: int | str) -> None:
        self.modes.append({"warn": 1}.get(str(mode), mode))  # type: ignore[arg-type]
        warnings.warn(SAID_ONCE, stacklevel=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake, patch = Cuda(), monkeypatch.setattr
    patch(torch.cuda, "Stream", Stream)
    patch(torch.cuda, "CUDAGraph", Graph)
    patch(torch.cuda, "current_stream", lambda *_: fake.stream)
    patch(torch.cuda, "stream", partial(On, fake))
    patch(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    patch(torch.cuda, "synchronize", lambda *_: None)
    patch(torch.cuda, "empty_cache", lambda: None)
    patch(torch._C, "_host_emptyCache", lambda: None, raising=False)
    patch(torch.cuda, "get_sync_debug_mode", lambda: fake.modes[-1])
    patch(torch.cuda, "set_sync_debug_mode", fake.set_mode)
    patch(capture, "_free_streams", {})
    return fake


DEVICE = torch.device("cuda", 0)


def fails() -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("run", [fails, lambda: ()])
def test_a_capture_that_fails_leaves_the_threads_stream(cuda: Cuda, run: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaRecorder(DEVICE).record(run)
    assert cuda.stream is cuda.first


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


def test_what_other_threads_wait_for_is_not_ours(cuda: Cuda) -> None:
    def other() -> None:
        says(WAIT, "something deprecated")()

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        warnings.filterwarnings("always", message="something")
        with _noting_waits() as waits:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert waits == []
            says(WAIT)()
    assert waits == ["called a synchronizing CUDA operation (Triggered internally)"]
    assert [str(each.message) for each in shown] == ["something deprecated"]
    assert cuda.modes == [0, 1, 0]


def test_warnings_are_shown_again_whoever_puts_things_back(cuda: Cuda) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        elsewhere = warnings.catch_warnings()
        with _noting_waits() as waits:
            elsewhere.__enter__()
        elsewhere.__exit__(None, None, None)  # as another thread's may, in between
        says(WAIT)()
    assert waits == []
    assert [str(each.message) for each in shown] == [WAIT]


def test_living_recorders_share_no_stream(cuda: Cuda) -> None:
    first, second, idle = (CudaRecorder(DEVICE) for _ in range(3))
    kept = first._stream
    assert first._stream is kept is not second._stream
    del first, idle
    gc.collect()
    assert CudaRecorder(DEVICE)._stream is kept

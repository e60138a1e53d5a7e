"""Captures on CUDA, with stand-ins for the functions of torch that need a GPU."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.call.execution import FAILED
from lookahead_hf.engines.cuda import capture, graphs
from lookahead_hf.engines.cuda.capture import CudaRecorder
from tests.helpers.calls import padded
from tests.helpers.fake_cuda import Cuda, Stream, on_cuda, put_in_place
from tests.helpers.replayed import WIDTHS, compare, small

WAIT = "called a synchronizing CUDA operation (Triggered internally)\nmore"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return put_in_place(monkeypatch)


DEVICE = torch.device("cpu")


def fails() -> Any:
    raise RuntimeError("out of memory")


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


def test_graphs_have_their_workspace_in_their_own_memory(cuda: Cuda) -> None:
    """Anybody may free the others; also on a stream that an earlier set of graphs had."""

    def run() -> tuple[torch.Tensor, ...]:
        cuda.multiply()
        return (torch.ones(1) + 1,)

    streams: list[Stream] = []
    for _ in range(2):
        recorder = CudaRecorder(DEVICE)
        for _ in range(2):
            assert recorder.try_out(run) is None
            recording = recorder.record(run)
            assert recording.graph.workspace == recorder._pool
            recording.replay()
            assert recording.outputs[0].item() == 2
        recorder.release([recording])
        streams.append(recorder._stream)
        del recorder
    assert streams[0] is streams[1]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_capture_that_fails_costs_nothing_but_the_graphs(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws and later captures work, in inference mode too; torch may leave both broken."""
    monkeypatch.setattr(graphs, "WIDTHS", WIDTHS)
    model, failures = small(), [1]
    kind = type(model.model.norm)
    own = kind.forward

    def fails_in_a_capture(self: Any, x: torch.Tensor) -> torch.Tensor:
        if cuda.within is not None and failures:
            failures.pop()
            raise torch.OutOfMemoryError("no memory for graphs")
        return own(self, x)

    monkeypatch.setattr(kind, "forward", fails_in_a_capture)
    with on_cuda(monkeypatch) as cuda, torch.inference_mode():
        assert str(compare(model, padded("left"), do_sample=sampled).execution).startswith(FAILED)
        assert cuda.stream is cuda.first
        assert not cuda.recording_to
        assert torch.multinomial(torch.ones(3), 1).shape == (1,)
        other = padded("none", rows=1)
        assert compare(model, other, do_sample=sampled).execution == "replayed"
        assert lookahead_hf.last_stats(model).num_accepted > 0  # type: ignore[union-attr]


def test_nothing_more_is_captured_where_draws_stay_broken(cuda: Cuda) -> None:
    cuda.mends = False
    before = torch.default_generator.get_state()
    with pytest.warns(RuntimeWarning, match="start a new process"), pytest.raises(RuntimeError):
        CudaRecorder(DEVICE).record(fails)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert capture.recorder_for(torch.device("cuda")) is None

"""What can be said of capturing on CUDA without a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from lookahead_hf.target import graph_recorder
from lookahead_hf.target.graph_recorder import CudaRecorder, said_to_wait


def test_only_a_wait_is_heard_as_one() -> None:
    said_once = (
        "Synchronization debug mode is a prototype feature and does not yet detect all "
        "synchronizing operations (Triggered internally at Module.cpp)"
    )
    assert said_to_wait([said_once, "something deprecated"]) is None
    wait = "called a synchronizing CUDA operation (Triggered internally)\nmore"
    assert said_to_wait([said_once, wait]) == (
        "a forward waits for the device: called a synchronizing CUDA operation "
        "(Triggered internally)"
    )


def test_living_recorders_share_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def stream(_: Any) -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(graph_recorder, "_free_streams", {})
    device = torch.device("cuda", 0)
    first, second, idle = (CudaRecorder(device) for _ in range(3))
    assert first._stream is first._stream is not second._stream
    assert len(made) == 2
    del first, idle
    gc.collect()
    assert CudaRecorder(device)._stream is made[0]

"""One object holds what is in force in a forward, on each thread."""

from __future__ import annotations

import threading

import torch

from lookahead_hf.runner.forward import ForwardContext, current, running

CPU = torch.device("cpu")


def test_forwards_nest_and_threads_have_their_own() -> None:
    outer, inner = ForwardContext(), ForwardContext()
    seen: list[ForwardContext | None] = []
    with running(outer, CPU):
        with running(inner, CPU):
            assert current() is inner
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert current() is outer
    assert seen == [None] and current() is None

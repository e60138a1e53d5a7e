"""Our attention inside a forward, and what it leaves behind."""

from __future__ import annotations

import torch

from lookahead_hf.runner import attention, implicit_positions


def test_overlapping_steps_leave_cudnn_as_it_was() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    first, second = attention._without_cudnn(), attention._without_cudnn()
    first.__enter__()
    second.__enter__()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_step_within_a_step_gives_the_outer_one_back() -> None:
    with attention.step(), implicit_positions.step(None):
        outer = attention._thread.step
        with attention.step(), implicit_positions.step(None):
            assert attention._thread.step is not outer
        assert attention._thread.step is outer
    assert attention._thread.step is None

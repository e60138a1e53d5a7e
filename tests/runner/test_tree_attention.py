"""When attention is left to the kernel, and what it is told."""

from __future__ import annotations

import pytest
import torch

from lookahead_hf.block.block import kernel_serves
from lookahead_hf.kernels import dispatch
from lookahead_hf.runner import attention


def layer(rows: int, heads: int, kv_heads: int, width: int, slots: int, dim: int) -> tuple:
    made = (rows, heads, width, dim), (rows, kv_heads, slots, dim), (rows, kv_heads, slots, dim)
    return tuple(torch.empty(shape, device="meta") for shape in made)


def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts, and shorter ones whose programs would leave processors of the GPU idle."""
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(attention, "_processors", lambda _: 132)
    assert attention.kernel_is_faster(*layer(1, 28, 4, 64, 512, 128))
    assert attention.kernel_is_faster(*layer(64, 28, 4, 8, 1024, 128))
    assert not attention.kernel_is_faster(*layer(1, 28, 4, 64, 256, 128))
    assert not attention.kernel_is_faster(*layer(8, 28, 4, 64, 512, 128))
    assert not attention.kernel_is_faster(*layer(1, 4, 1, 8, 2048, 512))
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")
    assert attention.kernel_is_faster(*layer(8, 28, 4, 64, 256, 128))


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOKAHEAD_HF_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_has_triton", lambda device: True)
    assert not kernel_serves(torch.device("cpu"), 8)
    assert kernel_serves(torch.device("cuda"), 64)
    assert not kernel_serves(torch.device("cuda"), 65)

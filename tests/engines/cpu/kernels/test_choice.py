"""The compiled choice of tokens and moves of accepted ones, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf import kernels
from lookahead_hf.engines.cpu.kernels import program
from lookahead_hf.kernels import PathTable, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 100, 8193, 49152])
def test_the_first_of_the_largest_is_chosen(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    inner = program.argmax
    monkeypatch.setattr(program, "argmax", lambda scores: calls.append(1) or inner(scores))
    for seed in range(5):
        scores = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert kernels.argmax(scores) == int(scores.float().numpy().argmax())
    scores[size // 2 :] = scores.max()
    scores[size // 3] = float("inf")
    assert kernels.argmax(scores) == size // 3
    scores[:] = float("-inf")
    assert kernels.argmax(scores) == 0
    scores[size - 1 :] = float("nan")
    assert kernels.argmax(scores) == size - 1
    assert len(calls) == 8


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.uint8])
def test_paths_are_moved_as_by_torch(dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    shapes = (2, 20, 3, 5), (2, 32, 1, 7)
    ours = [(100 * torch.rand(*shape)).to(dtype) for shape in shapes]
    expected = [store.clone() for store in ours]
    path = np.sort(np.stack([random.permutation(9)[:6] for _ in range(2)]), axis=1)
    lengths, counts = np.array([4, 9]), np.array([6, 3])
    kernels.compact_on_host(PathTable(ours), lengths, path, counts)
    given = map(torch.from_numpy, (lengths, path, counts))
    reference.compact_path(PathTable(expected), *given)
    for own, other in zip(ours, expected, strict=True):
        assert torch.equal(own, other)

"""topk_rows: the best entries of every row."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

SHAPES = [(1, 17, 8), (5, 1009, 8), (3, 8193, 5), (2, 8193, 64), (2, 50257, 16), (1, 151936, 8)]


def check(impl: ModuleType, logits: torch.Tensor, k: int, device: torch.device) -> torch.Tensor:
    """Values must be torch's and stand at the ids; return the ids."""
    values, ids = impl.topk_rows(logits.to(device), k)
    values, ids = values.cpu(), ids.cpu()
    assert values.dtype == torch.float32
    assert ids.dtype == torch.int64
    expected = logits.float().topk(k, dim=1).values
    assert torch.equal(values.nan_to_num(9e9), expected.nan_to_num(9e9))
    assert torch.equal(logits.float().gather(1, ids).nan_to_num(9e9), values.nan_to_num(9e9))
    assert all(len(set(row)) == k for row in ids.tolist())
    return ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "k"), SHAPES, ids=[f"R{rows}-V{vocab}-K{k}" for rows, vocab, k in SHAPES]
)
def test_random(
    impl: ModuleType, device: torch.device, rows: int, vocab: int, k: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator).to(dtype)
    logits[0, -3:] += 9
    check(impl, logits, k, device)


def test_ties_to_lower_id(device: torch.device) -> None:
    """The kernel orders equal entries by id (torch.topk leaves that open)."""
    from lookahead_hf.kernels.topk import topk_rows

    logits = torch.randint(0, 4, (3, 5003), generator=torch.Generator().manual_seed(0)).float()
    ids = topk_rows(logits.to(device), 8)[1].cpu()
    assert torch.equal(ids, logits.sort(dim=1, descending=True, stable=True).indices[:, :8])


def test_low_and_odd_scores(impl: ModuleType, device: torch.device) -> None:
    """Rows of minus infinity and NaN give ids of the vocabulary, each once."""
    logits = torch.full((3, 5000), -float("inf"))
    logits[1, 4999] = float("nan")
    logits[1, 17] = float("inf")
    logits[2] = 0.0
    ids = check(impl, logits, 8, device)
    assert ids[1, :2].tolist() == [4999, 17]


def test_strided(impl: ModuleType, device: torch.device) -> None:
    logits = torch.randn(4, 3, 8193, generator=torch.Generator().manual_seed(0))
    check(impl, logits[:, 1], 8, device)
    check(impl, logits[0].t().contiguous().t(), 8, device)


def test_k_beyond_kernel(impl: ModuleType, device: torch.device) -> None:
    logits = torch.randn(2, 1009, generator=torch.Generator().manual_seed(0))
    check(impl, logits, 100, device)


def test_k_beyond_vocabulary(impl: ModuleType) -> None:
    with pytest.raises(ValueError, match="k is 9, but a row has 5 entries"):
        impl.topk_rows(torch.zeros(1, 5), 9)

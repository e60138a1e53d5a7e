"""topk_rows: the best entries of every row."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

SHAPES = [(1, 17, 8), (5, 1009, 8), (3, 8193, 5), (2, 8193, 64), (2, 50257, 16), (1, 151936, 8)]
SHAPES += [(2, 1009, 100)]  # more than the kernel takes


def check(impl: ModuleType, logits: torch.Tensor, k: int, device: torch.device) -> torch.Tensor:
    return check_found(impl.topk_rows(logits.to(device), k), logits, k)


def check_found(found: Any, logits: torch.Tensor, k: int) -> torch.Tensor:
    """Values must be torch's and stand at the ids; return the ids."""
    values, ids, log_sum = (part.cpu() for part in found)
    assert values.dtype == torch.float32
    assert ids.dtype == torch.int64
    expected = logits.float().topk(k, dim=1).values
    assert torch.equal(values.nan_to_num(9e9), expected.nan_to_num(9e9))
    assert torch.equal(logits.float().gather(1, ids).nan_to_num(9e9), values.nan_to_num(9e9))
    assert all(len(set(row)) == k for row in ids.tolist())
    sums = logits.float().logsumexp(1)
    torch.testing.assert_close(log_sum, sums, atol=1e-5, rtol=1e-5, equal_nan=True)
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
    logits = torch.full((5, 5000), -float("inf"))
    logits[1, 4999] = float("nan")
    logits[1, 17] = float("inf")
    logits[2] = 0.0
    logits[3, 2] = float("inf")
    logits[4, 2100:2400] = torch.linspace(-90, 90, 300)
    ids = check(impl, logits, 8, device)
    assert ids[1, :2].tolist() == [4999, 17]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "k"), [(1009, 48), (8193, 8), (50257, 48)])
def test_shares_the_pass_of_verification(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, vocab: int, k: int, dtype: torch.dtype
) -> None:
    """One pass over the logits tells the walk and the best entries of all nodes that there are."""
    from lookahead_hf.kernels import topk, tree

    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    chain = torch.tensor([[-1, 0, 1]] * 2, device=device)
    counts = torch.tensor([2, 1], device=device)
    walk = tree.verify_tree(logits.to(device), chain + 5, chain, counts, keep_scan=True)
    assert walk.bonus.tolist() == logits[:, 0].float().argmax(-1).tolist()
    monkeypatch.setattr(topk, "tile_best", None)
    found = topk.topk_rows(logits.to(device).flatten(0, 1), k, walk.scan)
    live = [0, 1, 2, 3, 4]
    check_found([part[live] for part in found], logits.flatten(0, 1)[live], k)


@pytest.mark.parametrize("shares_scan", [True, False])
def test_few_are_found_at_nodes_where_no_path_ends(device: torch.device, shares_scan: bool) -> None:
    """All k where the path ends, fewer at other nodes, nothing in padding, which is not read."""
    from lookahead_hf.kernels import topk, tree
    from lookahead_hf.kernels.data import TopKCounts

    logits = torch.randn(2, 4, 1009, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    chain = torch.tensor([[-1, 0, 1, 2]] * 2)
    counts = torch.tensor([3, 1])
    tokens = torch.tensor([[0, int(best[0, 0]), int(best[0, 1]), -5], [0, -5, -5, -5]])
    logits[1, 2:] = float("nan")
    given = [each.to(device) for each in (logits, tokens, chain, counts)]
    walk = tree.verify_tree(*given, keep_scan=True)
    assert walk.num_accepted.tolist() == [2, 0]
    wanted = TopKCounts(walk.packed, given[3], 3)
    scan = walk.scan if shares_scan else None
    found = topk.topk_rows(given[0].flatten(0, 1), 7, scan, wanted)
    ids = found.ids.view(2, 4, 7)
    assert (ids >= 0).sum(2).tolist() == [[3, 3, 7, 3], [7, 3, 0, 0]]
    assert not any(part[6:].isnan().any() for part in found)
    for number, live in ((7, [2, 4]), (3, [0, 1, 3, 5])):
        parts = found.values[live, :number], found.ids[live, :number], found.log_sum[live]
        check_found(parts, logits.flatten(0, 1)[live], number)


def test_any_number_of_rows_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids may be long along their first axis only."""
    from lookahead_hf.kernels import topk

    grids = []

    def note(*_: object, grid: tuple[int, ...], **__: object) -> None:
        grids.append(grid)

    monkeypatch.setattr(type(topk._topk_kernel), "run", note)
    logits = torch.zeros(1, 50257, dtype=torch.bfloat16, device="meta").expand(1100 * 64, -1)
    topk.topk_rows(logits, 48)
    assert len(grids) == 2
    assert all(n <= 65535 for grid in grids for n in grid[1:])

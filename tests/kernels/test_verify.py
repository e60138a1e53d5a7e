"""verify_tree: the best token of every node and the walk down the tree."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from lookahead_hf.kernels import PathTable, reference
from tests.helpers.device import Tape
from tests.helpers.trees import plant, random_tree, walk

SHAPES = [
    (3, 0, 17),
    (1, 1, 1009),
    (3, 5, 1009),
    (2, 17, 8193),
    (2, 63, 17),
    (1, 64, 1009),
    (1, 1, 151936),
    pytest.param((2, 63, 151936), marks=pytest.mark.gpu),
]


def check(impl: ModuleType, scores: torch.Tensor, case: tuple, best: torch.Tensor, **noise) -> int:
    """Compare with a plain walk over `best`; return how many nodes were accepted."""
    tokens, parents, counts = case
    device = scores.device
    got = impl.verify_tree(
        scores, tokens.to(device), parents.to(device), counts.to(device), **noise
    )
    paths, bonus = walk(best, tokens, parents, counts)
    width = tokens.shape[1]
    live = torch.arange(width) <= counts[:, None]
    assert torch.equal(got.best.cpu(), torch.where(live, best, -1))
    assert got.num_accepted.tolist() == [len(path) - 1 for path in paths]
    assert got.bonus.tolist() == bonus
    assert got.path.tolist() == [path + [-1] * (width - len(path)) for path in paths]
    return sum(map(len, paths)) - len(paths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_walks(
    impl: ModuleType, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype | None
) -> None:
    """Greedy for logits of each type, and sampled where there is none."""
    rows, nodes, vocab = shape
    generator = torch.Generator().manual_seed(rows + nodes + vocab)
    scores = torch.randn(rows, 1 + nodes, vocab, generator=generator)
    parents, depth, counts = random_tree(rows, nodes, generator)
    noise: dict[str, torch.Tensor] = {}
    if dtype is None:
        scores = scores.softmax(-1)
        divisors = torch.empty(rows, int(depth.max()) + 1, vocab).exponential_(generator=generator)
        noise = {"noise": divisors.to(device), "depth": depth.to(device)}
        best = (scores / divisors[torch.arange(rows)[:, None], depth]).argmax(-1)
    else:
        scores = scores.to(dtype)
        best = scores.argmax(-1)
    tokens = torch.randint(0, vocab, parents.shape, generator=generator)
    tokens = plant(tokens, parents, best, generator)
    accepted = check(impl, scores.to(device), (tokens, parents, counts), best, **noise)
    assert accepted > 0 or nodes < 5


def test_sampled_divides_as_torch(impl: ModuleType, device: torch.device) -> None:
    """Quotients that are equal but for their last bit: an approximate division chooses others."""
    noise = torch.empty(64, 1, 1009).exponential_(generator=torch.Generator().manual_seed(1))
    probs = noise * 0.37
    zeros = torch.zeros(64, 1, dtype=torch.int64, device=device)
    got = impl.verify_tree(probs.to(device), zeros, zeros - 1, zeros[:, 0], noise.to(device), zeros)
    assert got.bonus.tolist() == (probs / noise).argmax(-1)[:, 0].tolist()


@pytest.mark.parametrize("vocab", [17, 8193, 10000])
@pytest.mark.parametrize(
    "places",
    [
        {},
        {5: float("inf"), -3: float("nan")},
        {-3: float("nan"), 7: -float("nan")},
        dict.fromkeys(range(17), -float("inf")),
        {0: -0.0},
    ],
)
def test_corner_scores(impl: ModuleType, device: torch.device, places: Any, vocab: int) -> None:
    """Ties and NaN go as in torch.argmax, and no id beyond the vocabulary comes back."""
    row = torch.full((vocab,), places.get(16, 0.0))
    for place, score in places.items():
        row[place] = score
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    got = impl.verify_tree(row[None, None].to(device), one, one - 1, one[0])
    assert got.bonus.tolist() == [int(row.argmax())]


def test_strided(impl: ModuleType, device: torch.device) -> None:
    """Logits may be a slice of a longer block, in any layout."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 9, 1009, generator=generator)
    layouts = [whole[:, -4:], whole.transpose(0, 1).contiguous().transpose(0, 1)[:, 2:6]]
    layouts.append(whole.transpose(1, 2).contiguous().transpose(1, 2)[:, :4])
    parents = torch.tensor([[-1, 0, 1, 1]]).expand(2, 4)
    counts = torch.tensor([3, 2])
    for scores in layouts:
        best = scores.argmax(-1)
        tokens = plant(torch.zeros(2, 4, dtype=torch.int64), parents, best, generator)
        check(impl, scores.to(device), (tokens, parents, counts), best)


def test_a_graph_can_capture_the_twins() -> None:
    """No operation reads a value on the host."""
    parents, depth, counts = random_tree(3, 15, generator := torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 7, parents.shape, generator=generator)
    scores = torch.randn(*parents.shape, 7, generator=generator).softmax(-1)
    noise = torch.empty(3, 64, 7).exponential_(generator=generator)
    table, lengths = PathTable([torch.randn(3, 70, 2, 4)]), torch.tensor([0, 3, 5])
    with Tape() as tape:
        got = reference.verify_tree(scores, tokens, parents, counts, noise, depth)
        reference.compact_path(table, lengths, got.path, got.num_accepted + 1)
    assert tape.reads == [] and tape.calls

"""reject_tree: what is emitted is distributed as the target's probabilities."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.trees import random_tree

SHAPES = [(3, 0, 17), (2, 1, 1009), (8, 5, 17), (4, 63, 1009), (2, 5, 8193)]


def random_case(rows: int, nodes: int, vocab: int) -> dict[str, torch.Tensor]:
    """Random trees whose drafts resemble the target's distributions, so that some are accepted."""
    generator = torch.Generator().manual_seed(rows + nodes + vocab)
    parents, _, counts = random_tree(rows, nodes, generator)
    target = torch.randn(rows, 1 + nodes, vocab, generator=generator)
    at_parent = target.gather(1, parents[:, 1:, None].clamp(min=0).expand(-1, -1, vocab))
    draft = (at_parent + torch.randn(at_parent.shape, generator=generator)).softmax(-1)
    tokens = torch.zeros(rows, 1 + nodes, dtype=torch.int64)
    if nodes:
        drawn = torch.multinomial(draft.flatten(0, 1), 1, generator=generator)
        tokens[:, 1:] = drawn.view(rows, nodes)
    return {
        "probs": target.softmax(-1),
        "draft_probs": draft,
        "tokens": tokens,
        "parents": parents,
        "num_nodes": counts,
        "uniforms": torch.rand(rows, nodes, generator=generator),
        "noise": torch.empty(rows, vocab).exponential_(generator=generator),
    }


def on(device: torch.device, case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in case.items()}


@pytest.mark.parametrize(
    ("rows", "nodes", "vocab"), SHAPES, ids=[f"B{b}-N{n}-V{v}" for b, n, v in SHAPES]
)
def test_kernel_is_twin(device: torch.device, rows: int, nodes: int, vocab: int) -> None:
    from lookahead_hf.kernels import reference, reject

    case = random_case(rows, nodes, vocab)
    got = reject.reject_tree(**on(device, case)).packed.cpu()
    assert torch.equal(got, reference.reject_tree(**case).packed)
    assert got[:, 0].sum() > 0 or nodes < 5


def two_level_case(
    rows: int, siblings: str, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two children of node 0, one child under each, drawn anew in every row; and the joint law."""
    vocab = 6
    first = torch.randn(vocab, generator=generator).mul(0.7).softmax(-1)
    second = torch.randn(vocab, vocab, generator=generator).mul(1.5).softmax(-1)
    q = torch.randn(vocab, generator=generator).mul(0.3).softmax(-1)
    q_below = torch.randn(vocab, vocab, generator=generator).softmax(-1)

    left = torch.multinomial(q.expand(rows, -1), 1, generator=generator)
    q_right = q.expand(rows, -1)
    if siblings == "without replacement":
        q_right = q_right.scatter(1, left, 0.0)
        q_right = q_right / q_right.sum(1, keepdim=True)
    right = torch.multinomial(q_right, 1, generator=generator)
    under_left, under_right = q_below[left[:, 0]], q_below[right[:, 0]]
    below = [torch.multinomial(law, 1, generator=generator) for law in (under_left, under_right)]

    tokens = torch.cat([torch.zeros_like(left), left, right, *below], 1)
    parents = torch.tensor([-1, 0, 0, 1, 2]).expand(rows, -1)
    probs = torch.stack(
        [first.expand(rows, -1), second[left[:, 0]], second[right[:, 0]]]
        + [torch.full((rows, vocab), 1 / vocab)] * 2,
        1,
    )
    case = {
        "probs": probs,
        "draft_probs": torch.stack([q.expand(rows, -1), q_right, under_left, under_right], 1),
        "tokens": tokens,
        "parents": parents,
        "num_nodes": torch.full((rows,), 4),
        "uniforms": torch.rand(rows, 4, generator=generator),
        "noise": torch.empty(rows, vocab).exponential_(generator=generator),
    }
    return case, first[:, None] * second


@pytest.mark.parametrize("siblings", ["with replacement", "without replacement"])
def test_distribution(device: torch.device, siblings: str) -> None:
    """First token, and first two tokens where two were decided, follow the target's law.

    The second token is decided by the same step only where the first was accepted, which depends on
    the draft alone once the first token is known. Statistics beyond the 0.1 % quantile fail.
    """
    from lookahead_hf.kernels import reference, reject

    case, _ = two_level_case(100, siblings, torch.Generator().manual_seed(6))
    got = reject.reject_tree(**on(device, case)).packed.cpu()
    assert torch.equal(got, reference.reject_tree(**case).packed)
    rows = 20000
    case, law = two_level_case(rows, siblings, torch.Generator().manual_seed(5))
    # So many rows take minutes in the interpreter.
    twin_or_kernel = reference if device.type == "cpu" else reject
    walk = twin_or_kernel.reject_tree(**on(device, case))
    path, bonus = walk.path.cpu(), walk.bonus.cpu()
    accepted = walk.num_accepted.cpu()
    node = path[:, 1].clamp(min=0)
    first = torch.where(accepted > 0, case["tokens"].gather(1, node[:, None])[:, 0], bonus)
    below = path[:, 2].clamp(min=0)
    second = torch.where(accepted > 1, case["tokens"].gather(1, below[:, None])[:, 0], bonus)
    assert 0.2 < float((accepted > 0).float().mean()) < 0.98

    assert chi_square(first.bincount(minlength=6), law.sum(1) * rows) < 20.5
    for token in range(6):
        decided = second[(first == token) & (accepted > 0)].bincount(minlength=6)
        expected = law[token] / law[token].sum() * decided.sum()
        assert chi_square(decided, expected) < 20.5


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())

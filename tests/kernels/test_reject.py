"""reject_tree walks and draws as its twin, whose distribution tests/verification examines."""

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
    from lookahead_hf.kernels import reference, tree

    case = random_case(rows, nodes, vocab)
    got = tree.reject_tree(**on(device, case)).packed.cpu()
    assert torch.equal(got, reference.reject_tree(**case).packed)
    assert got[:, 0].sum() > 0 or nodes < 5

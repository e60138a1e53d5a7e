"""Masks that are made when something reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lookahead_hf.block.block import LazyMask, is_read

MASK = torch.tensor([[[[0.0, -1.0, 0.0], [-1.0, -1.0, 0.0]]]])


def unread() -> tuple[LazyMask, list[torch.Tensor]]:
    """A stand-in, and the masks that were made for it."""
    masks: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        masks.append(MASK.clone())
        return masks[-1]

    return LazyMask.of(make, tuple(MASK.shape), MASK.dtype, MASK.device), masks


def test_its_shape_can_be_asked_for() -> None:
    mask, masks = unread()
    assert mask.shape == MASK.shape and len(mask.shape) == mask.ndim == mask.dim() == 4
    assert mask.size(-1) == 3 and mask.dtype == MASK.dtype and mask.device == MASK.device
    assert isinstance(mask, torch.Tensor) and not mask.is_cuda and not mask.requires_grad
    assert not masks and not is_read(mask)


READS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda mask: mask[..., :2],
    "sum": lambda mask: torch.zeros(1, 4, 2, 3) + mask,
    "list": lambda mask: torch.cat([mask, mask]),
    "comparison": lambda mask: mask == 0,
    "named": lambda mask: torch.nn.functional.scaled_dot_product_attention(
        torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.eye(3)[None, None], attn_mask=mask
    ),
    "host": lambda mask: torch.tensor(mask.tolist()),
    "in place": lambda mask: torch.ones_like(MASK).mul_(mask),
    "type": lambda mask: mask.to(torch.float16),
}


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_it_finds_the_mask(name: str) -> None:
    mask, masks = unread()
    for _ in range(2):
        got = READS[name](mask)
        assert type(got) is torch.Tensor
        assert torch.equal(got, READS[name](MASK))
    assert len(masks) == 1 and mask.made is masks[0]

"""What a block says its tokens see, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.block.block import Block, LazyMask, ancestor_words, ancestors
from tests.helpers.blocks import random_block


@pytest.mark.parametrize("seed", range(30))
def test_masks_show_what_tokens_see(seed: int) -> None:
    block, expected = random_block(seed)
    for lazy in (False, True):
        for name, mask in block.make_masks(is_causal=False, lazy=lazy).items():
            assert mask is not None and isinstance(mask, LazyMask) == lazy
            assert mask.shape == (*expected[name].shape[:1], 1, *expected[name].shape[1:])
            assert torch.equal(mask == 0, torch.from_numpy(expected[name])[:, None])
    words = Block(
        block.parents, block.query, block.pads, block.held, block.dtype, given_words=block.words
    )
    assert torch.equal(words.seen, block.seen)


def test_ancestors_have_a_bit_each() -> None:
    parents = np.array([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    seen = ancestors(parents)
    assert seen[0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert ancestor_words(parents).tolist() == [[1, 3, 5, 11], [1, 3, 7, 15]]
    wide = np.arange(64)[None] - 1
    assert ancestor_words(wide)[0, 63] == -1  # all 64 bits


def test_no_mask_where_each_token_sees_all_before_it() -> None:
    block, _ = random_block(0)
    even = {
        name: held._replace(lengths=held.lengths * 0 + 3, is_even=True)
        for name, held in block.held.items()
    }
    block = Block(block.parents, block.query, block.pads, even, block.dtype)
    built = block.make_masks(is_causal=True)
    assert [name for name, mask in built.items() if mask is None] == ["all"]


def test_a_mask_that_was_changed_is_not_the_blocks() -> None:
    block, _ = random_block(1)
    group = object()
    block.held = {name: held._replace(group=group) for name, held in block.held.items()}
    mask = block.make_masks(is_causal=False, lazy=True)["window"]
    assert isinstance(mask, LazyMask)
    assert block.kind_of(mask, group) == "window"
    assert block.kind_of(mask, object()) is None
    assert block.kind_of(mask.clone()) is None and block.kind_of(None) is None
    assert block.kind_of(mask.made) == "window"
    assert mask.made is not None
    mask.made.add_(1)
    assert block.kind_of(mask) is None and block.kind_of(mask.made) is None

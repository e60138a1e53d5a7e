"""What a block says its tokens see, against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.block.block import Block, Held, LazyMask, MaskKind, ancestor_words, ancestors

KINDS = {
    "all": MaskKind("all"),
    "window": MaskKind("window", window=4),
    "chunk": MaskKind("chunk", chunk=3),
}


def random_block(seed: int, group: Any = None) -> tuple[Block, dict[str, np.ndarray]]:
    """A random block, and by kind which slots each token sees, [rows, width, visible] bool."""
    random = np.random.default_rng(seed)
    rows, width, num_pads = random.integers(1, 4), random.integers(1, 8), random.integers(0, 3)
    pads = random.integers(0, num_pads + 1, rows)
    lengths = random.integers(0, 9, rows)
    parents = np.array([[random.integers(-1, i) for i in range(width)] for _ in range(rows)])
    if random.integers(3) == 0:
        parents = np.tile(np.arange(width) - 1, (rows, 1))
    visible = int((lengths + width).max()) + int(random.integers(3))
    columns = pads[:, None] + np.arange(visible)
    depth = np.zeros_like(parents)
    for row, node in np.ndindex(*parents.shape):
        depth[row, node] = 0 if parents[row, node] < 0 else depth[row, parents[row, node]] + 1
    query = (pads + lengths)[:, None] + depth
    expected = {}
    for name, kind in KINDS.items():
        seen = expected[name] = np.zeros((rows, width, visible), bool)
        for row, node in np.ndindex(rows, width):
            path, above = [], node
            while above >= 0:
                path.append(above)
                above = parents[row, above]
            known = [(slot, columns[row, slot]) for slot in range(lengths[row])]
            known += [(lengths[row] + each, query[row, each]) for each in path]
            own = query[row, node]
            for slot, column in known:
                near = kind.window is None or own - column < kind.window
                if kind.chunk is not None:
                    near = (own - pads[row]) // kind.chunk == (column - pads[row]) // kind.chunk
                seen[row, node, slot] = near
    told = torch.from_numpy
    held = {
        name: Held(
            kind,
            told(lengths),
            visible,
            told(pads),
            told(columns) if kind.is_limited else None,
            bool((lengths == lengths[0]).all()),
            group,
        )
        for name, kind in KINDS.items()
    }
    return Block(parents, told(query), told(pads), held, torch.float32), expected


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
    assert built["all"] is None and built["window"] is not None and built["chunk"] is not None


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

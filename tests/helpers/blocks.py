"""Random blocks, and what their tokens see by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf.block.block import Block, HeldSlots, MaskKind

KINDS = {
    "all": MaskKind("all"),
    "window": MaskKind("window", window=4),
    "chunk": MaskKind("chunk", chunk=3),
    "both": MaskKind("both", window=2, chunk=3),
    "indexed_attention": MaskKind("indexed_attention"),
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
                    near &= (own - pads[row]) // kind.chunk == (column - pads[row]) // kind.chunk
                seen[row, node, slot] = near
    told = torch.from_numpy
    held = {
        name: HeldSlots(
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

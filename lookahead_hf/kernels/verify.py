"""Verification of a draft tree: the best token of every node, then the walk down the tree.

    for row:
        best = [argmax(score[node]) for node in range(1 + num_nodes[row])]
        path = [0]
        for node in range(1, 1 + num_nodes[row]):
            if parents[row, node] == path[-1] and tokens[row, node] == best[path[-1]]:
                path.append(node)
        num_accepted, bonus = len(path) - 1, best[path[-1]]

Two launches: tile maxima over the vocabulary (`tiles.py`), then one program per row that reduces
them and walks. Nodes are [rows, 1 + nodes] with node 0 the row's last token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._common import LOWEST_PACKED, launch, packed_index, places
from lookahead_hf.kernels.data import TreeWalk
from lookahead_hf.kernels.tiles import tile_best


@triton.jit(do_not_specialize=["width", "tiles"])
def _walk_kernel(
    packed_ptr,  # [rows, 2 + width]
    best_ptr,  # [rows, width]
    tiles_ptr,  # [rows, width, tiles]
    tokens_ptr,  # [rows, width]
    parents_ptr,  # [rows, width]
    num_nodes_ptr,  # [rows]
    width,
    tiles,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    tile = tl.arange(0, TILES)
    entry = row * width + node
    live = node <= tl.load(num_nodes_ptr + row)
    packed = tl.load(
        tiles_ptr + entry[:, None] * tiles + tile[None, :],
        mask=live[:, None] & (tile < tiles)[None, :],
        other=LOWEST_PACKED,
    )
    best = tl.where(live, packed_index(tl.max(packed, axis=1)), -1)
    tl.store(best_ptr + entry, best, mask=node < width)

    token = tl.load(tokens_ptr + entry, mask=live, other=0)
    parent = tl.load(parents_ptr + entry, mask=live, other=-1)
    path = tl.where(node == 0, 0, -1)
    at = tl.min(node, axis=0)
    accepted = at
    wanted = tl.max(tl.where(node == at, best, -1), axis=0)
    walking = accepted == 0
    while walking:
        # Children come after their parents, so the walk ends whatever the padding holds.
        fits = live & (node > at) & (parent == at) & (token == wanted)
        child = tl.min(tl.where(fits, node, NODES), axis=0)
        walking = child < NODES
        at = tl.where(walking, child, at)
        accepted += walking.to(tl.int32)
        path = tl.where(node == accepted, at, path)
        wanted = tl.max(tl.where(node == at, best, -1), axis=0)
    out = packed_ptr + row * (2 + width)
    tl.store(out, accepted)
    tl.store(out + 1, wanted)
    tl.store(out + 2 + node, path, mask=node < width)


def verify_tree(
    scores: torch.Tensor,  # [rows, 1 + nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    depth: torch.Tensor | None = None,  # [rows, 1 + nodes]
    keep_scan: bool = False,
) -> TreeWalk:
    """See `reference.verify_tree`."""
    rows, width, _ = scores.shape
    scan = tile_best(scores, num_nodes, noise, depth, parts=keep_scan)
    best = torch.empty(rows, width, dtype=torch.int64, device=scores.device)
    packed = torch.empty(rows, 2 + width, dtype=torch.int64, device=scores.device)
    launch(
        _walk_kernel,
        (rows,),
        scores,
        packed_ptr=packed,
        best_ptr=best,
        tiles_ptr=scan.best,
        tokens_ptr=tokens.contiguous(),
        parents_ptr=parents.contiguous(),
        num_nodes_ptr=num_nodes.contiguous(),
        width=width,
        tiles=scan.best.shape[2],
        NODES=places(width),
        TILES=triton.next_power_of_2(scan.best.shape[2]),
        num_warps=8,
    )
    return TreeWalk(packed, best, scan if keep_scan else None)

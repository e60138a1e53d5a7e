"""Best entry of every tile of the vocabulary: the pass over the logits that others build on.

    for row, node, tile:
        best[row, node, tile] = max((score, -index) of the tile)     # one int64, see `_common.pack`

Scores are `scores[row, node]`, divided by `noise[row, depth[row, node]]` where noise is given.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._common import FP_FUSION, LOWEST_KEY, best_of, on_device, order_key


@triton.jit
def _tile_best_kernel(
    best_ptr,  # [rows, nodes, tiles] int64
    scores_ptr,  # [rows, nodes, vocab]
    noise_ptr,  # [rows, depths, vocab]
    depth_ptr,  # [rows, nodes]
    num_nodes_ptr,  # [rows]
    scores_stride_row,
    scores_stride_node,
    noise_stride_row,
    noise_stride_depth,
    depths,
    vocab,
    HAS_COUNT: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    node = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    entry = row * tl.num_programs(1) + node
    index = tile * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    if HAS_COUNT:
        # What follows a row's last node is padding, not worth reading. Compared as a block:
        # Triton's interpreter turns a scalar condition into integers where it is broadcast.
        inside = inside & (node + tl.zeros_like(index) <= tl.load(num_nodes_ptr + row))
    score = tl.load(
        scores_ptr + row * scores_stride_row + node * scores_stride_node + index,
        mask=inside,
        other=0.0,
    )
    if HAS_NOISE:
        depth = tl.load(depth_ptr + entry).to(tl.int64)
        depth = tl.minimum(tl.maximum(depth, 0), depths - 1)
        noise = tl.load(
            noise_ptr + row * noise_stride_row + depth * noise_stride_depth + index,
            mask=inside,
            other=1.0,
        )
        # `/` is approximate on NVIDIA; the chosen token must be torch's.
        score = tl.div_rn(score.to(tl.float32), noise)
    key = tl.where(inside, order_key(score), LOWEST_KEY)
    tl.store(best_ptr + entry * tl.num_programs(0) + tile, best_of(key, index))


def tile_best(
    scores: torch.Tensor,
    block: int,
    num_nodes: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    depth: torch.Tensor | None = None,
) -> torch.Tensor:
    """Best entry of every tile.

    Args:
        scores: Logits or probabilities, [rows, nodes, vocab].
        block: Entries per tile, a power of two.
        num_nodes: Index of the last node that counts in each row, [rows]; the others are not read.
        noise: Divisors by depth, [rows, depths, vocab] float32.
        depth: Depth of each node, [rows, nodes].

    Returns:
        Packed keys, [rows, nodes, tiles] int64.
    """
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    rows, nodes, vocab = scores.shape
    tiles = triton.cdiv(vocab, block)
    best = torch.empty(rows, nodes, tiles, dtype=torch.int64, device=scores.device)
    divisors = scores if noise is None else noise
    assert divisors.stride(-1) == 1, "noise of one depth must lie in one piece"
    with on_device(scores):
        _tile_best_kernel[(tiles, nodes, rows)](
            best_ptr=best,
            scores_ptr=scores,
            noise_ptr=divisors,
            depth_ptr=best if depth is None else depth.contiguous(),
            num_nodes_ptr=best if num_nodes is None else num_nodes,
            scores_stride_row=scores.stride(0),
            scores_stride_node=scores.stride(1),
            noise_stride_row=divisors.stride(0),
            noise_stride_depth=divisors.stride(1),
            depths=divisors.shape[1],
            vocab=vocab,
            HAS_COUNT=num_nodes is not None,
            HAS_NOISE=noise is not None,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=FP_FUSION,
        )
    return best

"""The k best entries of every row of logits, ties to the lower token id.

    for row:
        ids[row] = sorted(range(vocab), key=lambda id: (-logits[row, id], id))[:k]
        values[row] = logits[row, ids[row]]

Two launches: tile maxima (`tiles.py`), then one program per row that searches the k tiles with the
greatest maxima. No other tile can hold one of the k best: those k maxima come before all it has.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._common import (
    FP_FUSION,
    LOWEST_KEY,
    LOWEST_PACKED,
    on_device,
    order_key,
    pack,
    packed_index,
)
from lookahead_hf.kernels.tiles import tile_best

_CANDIDATES = 8192
_MIN_TILE = 256


@triton.jit
def _topk_kernel(
    values_ptr,  # [rows, k]
    ids_ptr,  # [rows, k]
    logits_ptr,  # [rows, vocab]
    tiles_ptr,  # [rows, tiles]
    logits_stride_row,
    vocab,
    tiles,
    k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, K)
    tile = tl.arange(0, TILES)
    maxima = tl.load(tiles_ptr + row * tiles + tile, mask=tile < tiles, other=LOWEST_PACKED)
    chosen = tl.full([K], TILES, tl.int64)
    for i in range(K):
        best = tl.max(maxima, axis=0)
        chosen = tl.where((rank == i) & (best > LOWEST_PACKED), packed_index(best) // BLOCK, chosen)
        maxima = tl.where(maxima == best, LOWEST_PACKED, maxima)

    index = (chosen.to(tl.int32) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = (chosen < tiles)[:, None] & (index < vocab)
    logits = logits_ptr + row * logits_stride_row
    score = tl.load(logits + index, mask=inside, other=0.0)
    packed = pack(tl.where(inside, order_key(score), LOWEST_KEY), index)
    packed = tl.reshape(packed, [K * BLOCK])
    ids = tl.full([K], 0, tl.int64)
    for i in range(K):
        best = tl.max(packed, axis=0)
        ids = tl.where(rank == i, packed_index(best), ids)
        packed = tl.where(packed == best, LOWEST_PACKED, packed)
    wanted = rank < k
    tl.store(ids_ptr + row * k + rank, ids, mask=wanted)
    value = tl.load(logits + ids, mask=wanted, other=0.0)
    tl.store(values_ptr + row * k + rank, value.to(tl.float32), mask=wanted)


def topk_rows(
    logits: torch.Tensor,  # [rows, vocab]
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dispatch.topk_rows`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    k_block = triton.next_power_of_2(k)
    block = max(_MIN_TILE, min(1024, _CANDIDATES // k_block))
    tiles = tile_best(logits[:, None], block)
    values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    with on_device(logits):
        _topk_kernel[(rows,)](
            values_ptr=values,
            ids_ptr=ids,
            logits_ptr=logits,
            tiles_ptr=tiles,
            logits_stride_row=logits.stride(0),
            vocab=vocab,
            tiles=tiles.shape[2],
            k=k,
            K=k_block,
            BLOCK=block,
            TILES=triton.next_power_of_2(tiles.shape[2]),
            num_warps=8 if k_block * block <= _CANDIDATES else 16,
            enable_fp_fusion=FP_FUSION,
        )
    return values, ids

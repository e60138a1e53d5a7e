"""The k best entries of every row of logits, ties to the lower token id, and the row's logsumexp.

    for row:
        ids[row] = sorted(range(vocab), key=lambda id: (-logits[row, id], id))[:k]
        values[row] = logits[row, ids[row]]
        log_sum[row] = log(sum(exp(logits[row])))

One pass over the logits (`tile_best`), which verification may have made already; then one program
per row reads the k parts with the greatest maxima again. No other part can hold one of the k best,
as those k maxima come before all of its entries. Each of the k takes a round of the program, so
fewer are found where fewer are wanted, and none in padding.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels import reference
from lookahead_hf.kernels._common import (
    LOWEST_KEY,
    LOWEST_PACKED,
    PART,
    finite,
    launch,
    order_key,
    pack,
    packed_index,
    packed_score,
    tile_best,
)
from lookahead_hf.kernels.data import RowScan, TopKCounts, TopRows

MAX_FUSED_K = 64
"""Largest k of the kernel, a program of which holds k tiles at once; torch finds more."""

_MOST_FOR_EIGHT_WARPS = 8192  # Most candidates that eight warps hold in registers


@triton.jit
def _log_sum(best_ptr, sums_ptr, tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    best = tl.load(best_ptr + tile, mask=tile < tiles, other=LOWEST_PACKED)
    top = finite(tl.where(tile < tiles, packed_score(best), float("-inf")))
    shift = tl.max(top, axis=0)
    sums = tl.load(sums_ptr + tile, mask=tile < tiles, other=0.0)
    total = tl.sum(sums * tl.exp(top - shift), axis=0)
    return tl.where(total == 0.0, float("-inf"), shift + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _num_wanted(walk_ptr, num_nodes_ptr, row, width, k, few):
    tree, node = row // width, row % width
    walk = walk_ptr + tree * (2 + width)
    end = tl.load(walk + 2 + tl.load(walk))
    of_node = tl.where(node == end, k, few)
    return tl.where(node <= tl.load(num_nodes_ptr + tree), of_node, 0)


@triton.jit
def _greatest(keys, count, K: tl.constexpr):
    rank = tl.arange(0, K)
    greatest = tl.full([K], LOWEST_PACKED, tl.int64)
    taken = count * 0
    while taken < count:
        best = tl.max(keys, axis=0)
        greatest = tl.where(rank == taken, best, greatest)
        keys = tl.where(keys == best, LOWEST_PACKED, keys)
        taken += 1
    return greatest


@triton.jit(do_not_specialize=["k", "few", "width", "tiles", "parts"])
def _topk_kernel(
    values_ptr,  # [rows, k]
    ids_ptr,  # [rows, k]
    log_sum_ptr,  # [rows]
    logits_ptr,  # [rows, vocab]
    best_ptr,  # [rows, tiles]
    parts_ptr,  # [rows, parts]
    sums_ptr,  # [rows, tiles]
    walk_ptr,  # [trees, 2 + width], rows = trees * width
    num_nodes_ptr,  # [trees]
    logits_stride_row,
    vocab,
    tiles,
    parts,
    width,
    k,
    few,
    HAS_WALK: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_wanted = k
    if HAS_WALK:
        num_wanted = _num_wanted(walk_ptr, num_nodes_ptr, row, width, k, few)
    rank = tl.arange(0, K)
    part = tl.arange(0, PARTS)
    key = tl.load(parts_ptr + row * parts + part, mask=part < parts, other=LOWEST_KEY)
    part_keys = tl.where(part < parts, pack(key, part), LOWEST_PACKED)
    best_parts = _greatest(part_keys, num_wanted, K)
    first = tl.where(best_parts > LOWEST_PACKED, packed_index(best_parts) * PART, vocab)
    index = first.to(tl.int32)[:, None] + tl.arange(0, PART)[None, :]
    inside = index < vocab
    logits = logits_ptr + row * logits_stride_row
    score = tl.load(logits + index, mask=inside, other=0.0)
    entry_keys = pack(tl.where(inside, order_key(score), LOWEST_KEY), index)
    best_entries = _greatest(tl.reshape(entry_keys, [K * PART]), num_wanted, K)
    is_found = rank < num_wanted
    ids = tl.where(is_found, packed_index(best_entries), -1)
    tl.store(ids_ptr + row * k + rank, ids, mask=rank < k)
    value = tl.load(logits + ids, mask=is_found, other=float("-inf"))
    tl.store(values_ptr + row * k + rank, value.to(tl.float32), mask=rank < k)
    total = _log_sum(best_ptr + row * tiles, sums_ptr + row * tiles, tiles, TILES)
    tl.store(log_sum_ptr + row, tl.where(num_wanted > 0, total, 0.0))


def topk_rows(
    logits: torch.Tensor,  # [rows, vocab]
    k: int,
    scan: RowScan | None = None,
    wanted: TopKCounts | None = None,
) -> TopRows:
    """See `reference.topk_rows`; entries that are not wanted have the id -1."""
    if k > MAX_FUSED_K:
        return reference.topk_rows(logits, k)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    ranks = triton.next_power_of_2(k)
    if scan is None:
        trees = logits[:, None] if wanted is None else logits.unflatten(0, (len(wanted.walk), -1))
        scan = tile_best(trees, None if wanted is None else wanted.num_nodes, parts=True)
    tiles, parts = scan.best.shape[2], scan.parts.shape[2]
    found = TopRows(
        torch.empty(rows, k, dtype=torch.float32, device=logits.device),
        torch.empty(rows, k, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )
    launch(
        _topk_kernel,
        (rows,),
        logits,
        values_ptr=found.values,
        ids_ptr=found.ids,
        log_sum_ptr=found.log_sum,
        logits_ptr=logits,
        best_ptr=scan.best,
        parts_ptr=scan.parts,
        sums_ptr=scan.sums,
        walk_ptr=scan.best if wanted is None else wanted.walk.contiguous(),
        num_nodes_ptr=scan.best if wanted is None else wanted.num_nodes.contiguous(),
        logits_stride_row=logits.stride(0),
        vocab=vocab,
        tiles=tiles,
        parts=parts,
        width=1 if wanted is None else wanted.walk.shape[1] - 2,
        k=k,
        few=k if wanted is None else wanted.few,
        HAS_WALK=wanted is not None,
        K=ranks,
        PART=PART,
        PARTS=triton.next_power_of_2(parts),
        TILES=triton.next_power_of_2(tiles),
        num_warps=8 if ranks * PART <= _MOST_FOR_EIGHT_WARPS else 16,
    )
    return found

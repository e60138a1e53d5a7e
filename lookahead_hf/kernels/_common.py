"""What several kernels share: an order for scores, a first launch, and one pass over the logits.

    for row, node, tile:
        best[row, node, tile] = max((score, -index) of the tile)     # one int64, see `pack`

Scores are `scores[row, node]`, divided by `noise[row, depth[row, node]]` where noise is given. For
`topk_rows` the same pass also notes the best key of every part of a tile and the tile's sum of
exponentials.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels.data import RowScan

LOWEST_KEY = tl.constexpr(-(2**31))
"""Below the key of every score, minus infinity included: masked lanes carry it and never win."""

LOWEST_PACKED = tl.constexpr(-(2**63))  # The same for packed keys


@triton.jit
def order_key(score):
    """int32 in the order of `torch.argmax`: every NaN equal and on top, -0.0 equal to 0.0."""
    score = score.to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def finite(score):
    """A finite score to subtract from others: infinity minus itself is NaN."""
    return tl.where(score != score, 1.0e38, tl.minimum(tl.maximum(score, -1.0e38), 1.0e38))


@triton.jit
def pack(key, index):
    """int64 that is greatest for the greatest key and, among equal keys, for the lowest index."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def packed_index(packed):
    """The index in a packed key."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def packed_score(packed):
    """The score in a packed key, float32."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(key, index):
    """Packed key of the greatest entry of a block, the lowest index among equals."""
    greatest = tl.max(key, axis=0)
    first = tl.min(tl.where(key == greatest, index, 0x7FFFFFFF), axis=0)
    return pack(greatest, first)


def places(width: int) -> int:
    """Places for the nodes of a row in a program, the same for most widths.

    A kernel per width would save next to nothing and have to be compiled.
    """
    return 1 if width == 1 else max(64, triton.next_power_of_2(width))


@triton.jit
def _trial_kernel(out_ptr):
    tl.store(out_ptr, 1)


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, **arguments: Any) -> None:
    """Launch a kernel on the device of a tensor."""
    # Triton 3.9 warns without `enable_fp_fusion`, and 3.10 has the other default.
    with torch.cuda.device(on.device) if on.is_cuda else nullcontext():
        kernel[grid](**arguments, enable_fp_fusion=True)


def try_launch(device: torch.device) -> None:
    """Launch a kernel that needs next to nothing; it raises what any launch would."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    launch(_trial_kernel, (1,), out, out_ptr=out, num_warps=1)


PART = 256  # Entries that `topk_rows` reads again for each of the k best parts

_MIN_TILE = 2048
_MAX_TILES = 128


@triton.jit(do_not_specialize=["nodes", "tiles", "depths"])
def _tile_best_kernel(
    best_ptr,  # [rows, nodes, tiles] int64
    parts_ptr,  # [rows, nodes, tiles * BLOCK / PART] int32
    sums_ptr,  # [rows, nodes, tiles] float32
    scores_ptr,  # [rows, nodes, vocab]
    noise_ptr,  # [rows, depths, vocab]
    depth_ptr,  # [rows, nodes]
    num_nodes_ptr,  # [rows]
    scores_stride_row,
    scores_stride_node,
    noise_stride_row,
    noise_stride_depth,
    nodes,
    tiles,
    depths,
    vocab,
    HAS_COUNT: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One axis for all: the others of a grid end at 65,535.
    tile = tl.program_id(0) % tiles
    entry = (tl.program_id(0) // tiles).to(tl.int64)
    row, node = entry // nodes, entry % nodes
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
    best = best_of(key, index)
    tl.store(best_ptr + entry * tiles + tile, best)
    if HAS_PARTS:
        of_part = tl.max(tl.reshape(key, [BLOCK // PART, PART]), axis=1)
        part = tile * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
        tl.store(parts_ptr + entry * tiles * (BLOCK // PART) + part, of_part)
        score = tl.where(inside, score.to(tl.float32), float("-inf"))
        weight = tl.exp(score - finite(packed_score(best)))
        tl.store(sums_ptr + entry * tiles + tile, tl.sum(weight, axis=0))


def tile_best(
    scores: torch.Tensor,  # [rows, nodes, vocab]
    num_nodes: torch.Tensor | None = None,  # [rows]
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    depth: torch.Tensor | None = None,  # [rows, nodes]
    *,
    parts: bool = False,
) -> RowScan:
    """Find the best entry of every tile.

    Nodes behind `num_nodes` are not read. Without `parts`, `RowScan.parts` and `sums` are empty.
    """
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    rows, nodes, vocab = scores.shape
    block = tile_size(vocab)
    tiles = triton.cdiv(vocab, block)
    detailed = (rows, nodes) if parts else (0, 0)
    scan = RowScan(
        torch.empty(rows, nodes, tiles, dtype=torch.int64, device=scores.device),
        torch.empty(*detailed, tiles * block // PART, dtype=torch.int32, device=scores.device),
        torch.empty(*detailed, tiles, dtype=torch.float32, device=scores.device),
    )
    divisors = scores if noise is None else noise
    assert divisors.stride(-1) == 1, "noise of one depth must lie in one piece"
    launch(
        _tile_best_kernel,
        (tiles * nodes * rows,),
        scores,
        best_ptr=scan.best,
        parts_ptr=scan.parts if parts else scan.best,
        sums_ptr=scan.sums if parts else scan.best,
        scores_ptr=scores,
        noise_ptr=divisors,
        depth_ptr=scan.best if depth is None else depth.contiguous(),
        num_nodes_ptr=scan.best if num_nodes is None else num_nodes.contiguous(),
        scores_stride_row=scores.stride(0),
        scores_stride_node=scores.stride(1),
        noise_stride_row=divisors.stride(0),
        noise_stride_depth=divisors.stride(1),
        nodes=nodes,
        tiles=tiles,
        depths=divisors.shape[1],
        vocab=vocab,
        HAS_COUNT=num_nodes is not None,
        HAS_NOISE=noise is not None,
        HAS_PARTS=parts,
        PART=PART,
        BLOCK=block,
        num_warps=4,
    )
    return scan


def tile_size(vocab: int) -> int:
    """Entries per tile: the walk holds all tiles of all nodes, so there must be few."""
    return max(_MIN_TILE, triton.next_power_of_2(triton.cdiv(vocab, _MAX_TILES)))

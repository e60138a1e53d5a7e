"""Parts of the attention kernels: sizes of a launch, loads, the running softmax, ancestors."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

LEAST_KEYS = 128
"""Fewest keys that a program reads."""

TAIL = tl.constexpr(64)
"""Keys are cut into tiles at multiples of this; a row has as many nodes at most."""

_LOG2E = tl.constexpr(1.4426950408889634)


def tile_sizes(queries: int, dim: int, dtype: torch.dtype, is_rdna: bool = False) -> dict[str, int]:
    """Queries, keys and warps per tile, as many as fit into registers for up to 256 dimensions.

    float32 is multiplied without tensor cores and takes a register per operand. RDNA holds the
    operands of a product twice.
    """
    keys = 16 if dtype == torch.float32 else 32 if dim > 128 else 64
    if is_rdna:
        keys = max(16, keys // 2)
    return {
        "WARPS": 8 if is_rdna else 4,
        "QUERIES": min(keys, max(16, triton.next_power_of_2(queries))),
        "KEYS": keys,
    }


def keys_per_split(slots: int, programs: int, device: torch.device) -> int:
    """Keys of one program: two programs per processor where the cache is long enough.

    It depends on the capacity and not on the lengths, so that no bit changes in mid-text.
    """
    splits = max(1, min(64, 2 * _processors(device) // programs))
    return max(LEAST_KEYS, triton.cdiv(triton.cdiv(slots, splits), 64) * 64)


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 128
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def is_rdna(device: torch.device) -> bool:
    """Return whether a device is an AMD GPU with 32 lanes in a warp: all but data-centre ones."""
    if device.type != "cuda" or not torch.version.hip:
        return False
    return int(torch.cuda.get_device_properties(device).warp_size) == 32


@lru_cache
def num_stages(device: torch.device, dim: int) -> int:
    """Tiles in flight on a device; see `stages`."""
    if device.type != "cuda" or torch.version.hip:
        return stages(dim, 0)
    return stages(dim, torch.cuda.get_device_capability(device)[0])


def stages(dim: int, major: int) -> int:
    """Three tiles in flight where they fit: up to 128 dimensions, on GPUs with 227 KB per program.

    Those are of compute capability 9.0 and 10.x; 12.x has 99 KB. `major` is 0 for AMD.
    """
    return 3 if dim <= 128 and major in (9, 10) else 2


@triton.jit
def load_vectors(base, offset, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The vectors of `DIM` values that begin at `base + offset`, zero where not inside."""
    dim = tl.arange(0, BLOCK)
    mask = inside[:, None] & (dim < DIM)[None, :]
    return tl.load(base + offset[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def store_vectors(base, offset, values, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Write what `load_vectors` reads."""
    dim = tl.arange(0, BLOCK)
    mask = inside[:, None] & (dim < DIM)[None, :]
    tl.store(base + offset[:, None] + dim[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def depth_of(bits):
    """Ancestors in a 64-bit word, the node itself not counted."""
    pairs = bits - ((bits >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    total = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    total += total >> 8
    total += total >> 16
    total += total >> 32
    return (total & 0x7F).to(tl.int32) - 1


@triton.jit
def ancestor_at(bits, depth):
    """The ancestor at each of some depths; 0 where a node has none.

    A depth is the rank among the set bits, because parents come before their children.
    """
    node = tl.arange(0, TAIL)
    member = ((bits >> node.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.where(member == 1, tl.cumsum(member, axis=0) - 1, -1)
    return tl.sum(tl.where(rank[None, :] == depth[:, None], node[None, :], 0), axis=1)


@triton.jit
def tail_start(place):
    """First key that a node at a place in the text reads for itself."""
    return tl.maximum(place + 1 - TAIL, 0) // TAIL * TAIL


@triton.jit
def keys_of_split(length, splits, least):
    """An equal share of the prefix in whole tiles, but no fewer keys than `least`."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), TAIL) * TAIL, least)


@triton.jit
def in_window(place, index, length, columns_ptr, pads_ptr, row, window, num_columns, COLUMNS):
    """Whether nodes at `place` and keys at `index` are less than `window` columns apart."""
    column = index
    if COLUMNS:
        # Columns less the row's pads: from the end of the list on this is the index in the text.
        known = index < tl.minimum(length, num_columns)
        column = tl.load(columns_ptr + row * num_columns + index, mask=known, other=0)
        pads = tl.load(pads_ptr + row).to(tl.int32)
        column = tl.where(known, column.to(tl.int32) - pads, index)
    return place[:, None] - column[None, :] < window


@triton.jit
def first_in_window(length, window, KEYS: tl.constexpr):
    """A tile before which no key is in the window of any node."""
    return tl.maximum(length - window + 1, 0) // KEYS * KEYS


@triton.jit
def attend(q, k, v, seen, top, total, acc, scale, softcap, SOFTCAP: tl.constexpr):
    """Add a tile of keys to a running softmax in base 2; a tile that is not seen changes no bit."""
    # The default precision for float32 is TF32 on NVIDIA, which keeps 10 bits.
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (1 - 2 / (tl.exp2(score * (2 * _LOG2E / softcap)) + 1))
    score = tl.where(seen, score * _LOG2E, float("-inf"))
    above = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing yet: minus infinity less itself would be NaN.
    shift = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return above, total, acc * fade[:, None] + mixed


@triton.jit
def merge(top, total, acc, other_top, other_total, other_acc):
    """One running softmax of two."""
    above = tl.maximum(top, other_top)
    shift = tl.where(above == float("-inf"), 0.0, above)
    fade, other_fade = tl.exp2(top - shift), tl.exp2(other_top - shift)
    total = total * fade + other_total * other_fade
    return above, total, acc * fade[:, None] + other_acc * other_fade[:, None]


@triton.jit
def add_sink(top, total, acc, sink):
    """A score of each head that takes its share of the softmax and has no value."""
    sink = sink.to(tl.float32) * _LOG2E
    return merge(top, total, acc, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(acc))

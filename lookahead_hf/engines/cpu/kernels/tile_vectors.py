"""Vector code around products of tiles: packing, and attention's weights.

The sums that vectors add up here have the order of those of tiles.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_hf.engines.cpu.kernels.fields import TILE
from lookahead_hf.engines.cpu.kernels.llvm import (
    BFLOAT16,
    F32,
    I16,
    I32,
    I64,
    all_of,
    fma,
    in_pieces,
    int64,
    load_bits,
    pointer_at,
    shuffle,
    spread,
    store_vector,
    vector_of,
    widened,
)
from lookahead_hf.engines.cpu.kernels.tiles import STEP

SINGLES, WORDS, HALVES = (vector_of(each, TILE) for each in (F32, I32, I16))
"""Vectors of 16 float32 numbers, of their bits, and of bfloat16 numbers."""


_UNPACKED = (1, (0, 16, 1, 17), (2, 18, 3, 19)), (2, (0, 1, 16, 17), (2, 3, 18, 19))
"""Distances of rows, and the places of their numbers within 128 bits of the one and the other."""


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 numbers of 32 bits: 64 shuffles."""
    for distance, low, high in _UNPACKED:
        after = list(rows)
        for i in range(TILE):
            if not i & distance:
                for to, part in ((i, low), (i + distance, high)):
                    places = [quarter + each for quarter in range(0, TILE, 4) for each in part]
                    after[to] = shuffle(builder, rows[i], rows[i + distance], places)
        rows = after
    # rows[4 g + j]: lane q holds numbers of rows 4 g to 4 g + 3 at column 4 q + place[j]
    even = [first + i for first in (0, 8, 16, 24) for i in range(4)]
    odd = [each + 4 for each in even]
    out: list[Any] = [None] * TILE
    for j, place in enumerate((0, 2, 1, 3)):
        for first, quarters in ((0, even), (4, odd)):
            ab = shuffle(builder, rows[j], rows[4 + j], quarters)
            cd = shuffle(builder, rows[8 + j], rows[12 + j], quarters)
            out[first + place] = shuffle(builder, ab, cd, even)
            out[first + 8 + place] = shuffle(builder, ab, cd, odd)
    return out


@intrinsic
def store_tile(typing, c, count, out, out_stride, rows):
    """Write a tile, [16 rows][16 tokens], as tokens of `rows` numbers, `out_stride` bytes apart."""

    def generate(context, builder, signature, arguments):
        c, count, out, out_stride, rows = arguments
        numbers = [
            builder.load(pointer_at(builder, c, int64(i), 64, SINGLES), align=4)
            for i in range(TILE)
        ]
        is_whole = builder.icmp_unsigned("==", rows, int64(TILE))
        for t, row in enumerate(_transposed(builder, numbers)):
            with builder.if_then(builder.icmp_unsigned("<", int64(t), count)):
                at = builder.add(out, builder.mul(out_stride, int64(t)))
                to = builder.inttoptr(at, SINGLES.as_pointer())
                with builder.if_else(is_whole) as (whole, part):
                    with whole:
                        builder.store(row, to, align=4)
                    with part:
                        store_vector(builder, row, to, rows)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def pack_tokens(typing, x, x_stride, count, columns, size, out):
    """Write up to 16 tokens of `size` numbers in pairs: [ceil(size / 32)][16 pairs][columns][2].

    Columns without a token hold numbers of the first one. Behind the last number there are zeros up
    to a whole tile. Up to 64 bytes behind the result are overwritten. `x_stride` is bytes. A single
    token whose size is a multiple of 32 is packed as it is.
    """

    def generate(context, builder, signature, arguments):
        x, x_stride, count, columns, size, out = arguments
        row_bytes = builder.mul(columns, int64(4))
        firsts = []
        for t in range(TILE):
            is_there = builder.icmp_unsigned("<", int64(t), count)
            place = builder.select(is_there, int64(t), int64(0))
            firsts.append(builder.add(x, builder.mul(place, x_stride)))

        def pack(step: Any, rest: Any) -> None:
            at = builder.mul(step, int64(STEP))
            rows = [
                builder.bitcast(load_bits(builder, first, at, 2, STEP, rest), WORDS)
                for first in firsts
            ]
            to = builder.add(out, builder.mul(builder.mul(step, int64(TILE)), row_bytes))
            for k, row in enumerate(_transposed(builder, rows)):  # each over the end of the last
                address = builder.add(to, builder.mul(row_bytes, int64(k)))
                builder.store(row, builder.inttoptr(address, WORDS.as_pointer()), align=4)

        in_pieces(builder, size, STEP, pack)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def interleave(typing, v, v_stride, pairs, dim, out):
    """Write values of pairs of slots as tiles, [ceil(dim / 16)][pairs][16][2].

    Behind the last number there are zeros up to a whole tile. `v_stride` is bytes.
    """

    def generate(context, builder, signature, arguments):
        v, v_stride, pairs, dim, out = arguments
        with cgutils.for_range(builder, pairs, intp=I64) as pair:
            first = builder.add(v, builder.mul(v_stride, builder.shl(pair.index, int64(1))))
            slots = first, builder.add(first, v_stride)

            def write(tile: Any, rest: Any) -> None:
                at = builder.mul(tile, int64(TILE))
                a, b = (
                    builder.zext(load_bits(builder, each, at, 2, TILE, rest), WORDS)
                    for each in slots
                )
                place = builder.add(builder.mul(tile, pairs), pair.index)
                both = builder.or_(a, builder.shl(b, all_of(WORDS, 16)))
                builder.store(both, pointer_at(builder, out, place, 64, WORDS), align=4)

            in_pieces(builder, dim, TILE, write)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def add_like_tiles(num_d: int, is_partial: bool = False) -> Any:
    """Make a function that adds up the values of up to 32 slots as a tile does.

    Slots are `near` ones from `slot` on, then those listed; the function adds to `num_d` vectors
    of 16 float32 numbers at `out`. If it `is_partial`, values have only `rest` numbers there.
    """

    @intrinsic
    def add(typing, high, low, values, stride, slot, near, listed, count, out, rest):
        def generate(context, builder, signature, arguments):
            high, low, values, stride, slot, near, listed, count, out, rest = arguments
            sums = [
                [cgutils.alloca_once_value(builder, all_of(SINGLES, 0.0)) for _ in range(num_d)]
                for _ in range(4)
            ]

            def weight(base: Any, s: Any) -> Any:
                bits = builder.load(pointer_at(builder, base, s, 2, I16))
                wide = builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
                return spread(builder, wide, SINGLES)

            def take(s: Any, parity: int) -> None:
                where = cgutils.alloca_once(builder, I64)
                builder.store(builder.add(slot, s), where)
                with builder.if_then(builder.icmp_signed(">=", s, near)):
                    place = builder.sub(s, near)
                    builder.store(builder.load(pointer_at(builder, listed, place, 8, I64)), where)
                row = builder.add(values, builder.mul(builder.load(where), stride))
                weights = weight(high, s), weight(low, s)
                for d in range(num_d):
                    place, part = int64(TILE * d), rest if is_partial else None
                    v = widened(builder, load_bits(builder, row, place, 2, TILE, part), BFLOAT16)
                    for chain, each in zip((parity, 2 + parity), weights, strict=True):
                        total = sums[chain][d]
                        builder.store(fma(builder, each, v, builder.load(total)), total)

            with cgutils.for_range(builder, builder.udiv(count, int64(2)), intp=I64) as loop:
                first = builder.mul(loop.index, int64(2))
                take(first, 0)
                take(builder.add(first, int64(1)), 1)
            is_odd = builder.icmp_unsigned("!=", builder.urem(count, int64(2)), int64(0))
            with builder.if_then(is_odd):
                take(builder.sub(count, int64(1)), 0)
            for d in range(num_d):
                to = pointer_at(builder, out, int64(d), 64, SINGLES)
                h0, h1, l0, l1 = (builder.load(sums[chain][d]) for chain in range(4))
                total = builder.fadd(builder.load(to, align=4), builder.fadd(h0, h1))
                builder.store(builder.fadd(total, builder.fadd(l0, l1)), to, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return add

"""Vector code around products of tiles: packing, rounding, results, and attention's weights."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial, reduce
from typing import Any

from numba.core import cgutils

from lookahead_hf.engines.cpu.kernels._vectors_numba import larger
from lookahead_hf.engines.cpu.kernels.fields import TILE
from lookahead_hf.engines.cpu.kernels.llvm import (
    BFLOAT16,
    F32,
    I16,
    I32,
    I64,
    LOG2_E,
    all_of,
    emits,
    exp2_of,
    in_pieces,
    int64,
    load_bits,
    narrowed,
    pointer_at,
    shuffle,
    spread,
    store_vector,
    vector_of,
)
from lookahead_hf.engines.cpu.kernels.tiles import STEP, TILE_BYTES, Tiles, mixing

SINGLES, WORDS = vector_of(F32, TILE), vector_of(I32, TILE)
"""Vectors of 16 float32 numbers, and of their bits."""

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


def _halves(builder: Any, words: Any) -> list[Any]:
    """Return the low and the high numbers of words of two bfloat16 numbers as float32."""
    parts = builder.shl(words, all_of(WORDS, 16)), builder.and_(words, all_of(WORDS, 0xFFFF0000))
    return [builder.bitcast(each, SINGLES) for each in parts]


def _paired(builder: Any, low: Any, high: Any) -> Any:
    """Round two vectors to bfloat16, and return words that have one number of each."""
    low, high = (builder.zext(narrowed(builder, each, BFLOAT16), WORDS) for each in (low, high))
    return builder.or_(low, builder.shl(high, all_of(WORDS, 16)))


def _rounded(builder: Any, c: Any, columns: Any) -> list[Any]:
    """Return two tiles of sums as words of two bfloat16 numbers, of a row and of the one below it.

    A row has `columns` numbers.
    """
    starts = c, builder.add(c, int64(TILE_BYTES))
    offsets = [builder.mul(columns, int64(row % TILE)) for row in range(STEP)]
    at = [pointer_at(builder, starts[i // TILE], by, 4, SINGLES) for i, by in enumerate(offsets)]
    rows = [builder.load(place, align=4) for place in at]
    return [_paired(builder, *pair) for pair in zip(rows[::2], rows[1::2], strict=True)]


@emits
def store_packed(context, builder, c, columns, out):
    """Write rounded sums in the layout of `pack_tokens`, but nothing behind the last column."""
    for pair, word in enumerate(_rounded(builder, c, columns)):
        offset = builder.mul(columns, int64(pair))
        store_vector(builder, word, pointer_at(builder, out, offset, 4, WORDS), columns)


@emits
def store_tokens(context, builder, c, columns, count, targets, rows, adds, factor):
    """Write 32 rows of sums, rounded, to `count` tokens, or add them, by a factor, to these.

    The sums are those of `_rounded`. Of each token, whose address is among `targets`, the first
    `rows` numbers are written.
    """
    bits, adds = vector_of(I16, STEP), builder.icmp_unsigned("!=", adds, adds.type(0))
    words, factors = _rounded(builder, c, columns), spread(builder, factor, SINGLES)
    for t, new in enumerate(_transposed(builder, words)):
        with builder.if_then(builder.icmp_unsigned("<", int64(t), count)):
            at = builder.load(pointer_at(builder, targets, int64(t), 8, I64))
            to = builder.inttoptr(at, bits.as_pointer())
            with builder.if_else(adds) as (add, write):
                with add:
                    old = builder.bitcast(load_bits(builder, at, int64(0), 2, STEP, rows), WORDS)
                    scaled = [builder.fmul(each, factors) for each in _halves(builder, new)]
                    added = _halves(builder, _paired(builder, *scaled))
                    sums = map(builder.fadd, _halves(builder, old), added)
                    made = builder.bitcast(_paired(builder, *sums), bits)
                    store_vector(builder, made, to, rows)
                with write:
                    store_vector(builder, builder.bitcast(new, bits), to, rows)


@emits
def pack_tokens(context, builder, x, x_stride, count, columns, size, out):
    """Write up to 16 tokens of `size` numbers in pairs: [ceil(size / 32)][16 pairs][columns][2].

    Columns without a token hold numbers of the first one. Behind the last number there are zeros up
    to a whole tile. Up to 64 bytes behind the result are overwritten. `x_stride` is bytes. A single
    token whose size is a multiple of 32 is packed as it is.
    """
    row_bytes = builder.mul(columns, int64(4))
    firsts = []
    for t in range(TILE):
        is_there = builder.icmp_unsigned("<", int64(t), count)
        place = builder.select(is_there, int64(t), int64(0))
        firsts.append(builder.add(x, builder.mul(place, x_stride)))

    def pack(step: Any, rest: Any) -> None:
        at = builder.mul(step, int64(STEP))
        rows = [
            builder.bitcast(load_bits(builder, first, at, 2, STEP, rest), WORDS) for first in firsts
        ]
        to = builder.add(out, builder.mul(builder.mul(step, int64(TILE)), row_bytes))
        for k, row in enumerate(_transposed(builder, rows)):  # each over the end of the last
            address = builder.add(to, builder.mul(row_bytes, int64(k)))
            builder.store(row, builder.inttoptr(address, WORDS.as_pointer()), align=4)

    in_pieces(builder, size, STEP, pack)


@emits
def turn(context, builder, rows, slots, dim, by, out):
    """Write values as tiles of 32 slots, [slots / 32][ceil(dim / 16)][16 numbers][32].

    `rows` are the addresses of the slots' values, [slots] int64. There are zeros behind the last
    number of a slot. Tiles of the next 32 slots are `by` bytes behind.
    """
    chunks = builder.udiv(slots, int64(STEP))
    with cgutils.for_range(builder, chunks, intp=I64) as chunk:
        places = [builder.add(builder.mul(chunk.index, int64(STEP)), int64(i)) for i in range(STEP)]

        def write(tile: Any, rest: Any) -> None:
            at = builder.mul(tile, int64(TILE))
            found = [
                builder.zext(load_bits(builder, row, at, 2, TILE, rest), WORDS)
                for row in [builder.load(pointer_at(builder, rows, i, 8, I64)) for i in places]
            ]
            pairs = [
                builder.or_(a, builder.shl(b, all_of(WORDS, 16)))
                for a, b in zip(found[::2], found[1::2], strict=True)
            ]
            first = builder.add(out, builder.mul(chunk.index, by))
            for k, row in enumerate(_transposed(builder, pairs)):
                to = pointer_at(builder, first, builder.add(at, int64(k)), 64, WORDS)
                builder.store(row, to, align=4)

        in_pieces(builder, dim, TILE, write)


def _at(builder: Any, base: Any, row: Any, kind: Any) -> Any:
    return builder.load(pointer_at(builder, base, row, 64, kind), align=4)


@emits
def divide(context, builder, note, sums, rows):
    """Divide weighted sums, [rows][16 queries], by the sums of the weights in the queries' note."""
    total = all_of(SINGLES, 0.0)
    for row in range(2, 6):
        total = builder.fadd(total, _at(builder, note, int64(row), SINGLES))
    share = builder.fdiv(all_of(SINGLES, 1.0), total)
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        place = pointer_at(builder, sums, loop.index, 64, SINGLES)
        builder.store(builder.fmul(builder.load(place, align=4), share), place, align=4)


@emits
def find_largest(context, builder, scores, rows, out):
    """Write the largest scores of 16 queries; `rows` is a multiple of 4."""
    found = [cgutils.alloca_once_value(builder, all_of(SINGLES, float("-inf"))) for _ in range(4)]
    with cgutils.for_range(builder, builder.lshr(rows, int64(2)), intp=I64) as loop:
        for i, each in enumerate(found):
            row = builder.add(builder.shl(loop.index, int64(2)), int64(i))
            after = larger(builder, builder.load(each), _at(builder, scores, row, SINGLES))
            builder.store(after, each)
    most = reduce(partial(larger, builder), map(builder.load, found))
    builder.store(most, builder.inttoptr(out, SINGLES.as_pointer()), align=4)


@emits
def weigh(
    context, builder, scores, chunks, most, totals, scale, weights, values, by, out, room, tiles
):
    """Turn scores, [32 chunks][16 queries], into weights, and add values by them.

    Weights are not normalised, and two bfloat16 numbers each, [chunks][2 parts][16 pairs of
    rows][16][2]. `scale` is what scores are multiplied by; `most` are the queries' largest scores;
    infinity gives a query weights of 0. To each of four `totals`, [4][16], every fourth row is
    added. While vectors make a chunk of weights, tiles add values by the one before; see `mixing`.
    """
    upper = all_of(WORDS, 0xFFFF0000)
    factors = builder.fmul(spread(builder, scale, SINGLES), all_of(SINGLES, LOG2_E))
    most = _at(builder, most, int64(0), SINGLES)
    places = [pointer_at(builder, totals, int64(row), 64, SINGLES) for row in range(4)]
    sums = [cgutils.alloca_once_value(builder, builder.load(each, align=4)) for each in places]

    def weigh_rows(first: Any) -> None:
        made = list[Any]()
        for row, total in enumerate(sums):
            score = _at(builder, scores, builder.add(first, int64(row)), SINGLES)
            weight = exp2_of(builder, builder.fmul(builder.fsub(score, most), factors))
            builder.store(builder.fadd(builder.load(total), weight), total)
            high = builder.and_(builder.bitcast(weight, WORDS), upper)
            low = builder.fsub(weight, builder.bitcast(high, SINGLES))
            made.append((high, builder.and_(builder.bitcast(low, WORDS), upper)))
        pair = builder.sub(first, builder.and_(builder.lshr(first, int64(1)), int64(TILE - 1)))
        for i, (even, odd) in enumerate(zip(made[::2], made[1::2], strict=True)):
            for number, (a, b) in enumerate(zip(even, odd, strict=True)):
                both = builder.or_(builder.lshr(a, all_of(WORDS, 16)), b)
                row = builder.add(pair, int64(number * TILE + i))
                builder.store(both, pointer_at(builder, weights, row, 64, WORDS), align=4)

    emit, turns = Tiles(context, builder, room, tiles), builder.add(chunks, int64(1))
    with (
        mixing(builder, emit, weights, values, by, out) as add,
        cgutils.for_range(builder, turns, intp=I64) as loop,
    ):
        with builder.if_then(builder.icmp_unsigned("!=", loop.index, int64(0))):
            add(builder.sub(loop.index, int64(1)))
        with (
            builder.if_then(builder.icmp_unsigned("<", loop.index, chunks)),
            cgutils.for_range(builder, int64(STEP // 4), intp=I64) as inner,
        ):
            row = builder.add(builder.shl(loop.index, int64(3)), inner.index)
            weigh_rows(builder.shl(row, int64(2)))
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), place, align=4)

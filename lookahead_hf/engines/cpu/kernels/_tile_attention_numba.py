"""Attention by tiles: the queries of all heads that share a head of K and V, side by side.

Scores are products of keys, in place, by packed queries. Values are added up by weights of two
bfloat16 numbers each, so that 16 of their bits count. A tile adds up 32 slots: numbers of even and
of odd places in a chain each, then both to the total (`add_like_tiles` does the same for the slots
that fill no tile, or that only one token sees). A token's sums are thus the same whatever is beside
it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from lookahead_hf.engines.cpu.kernels._elementwise_numba import tanh
from lookahead_hf.engines.cpu.kernels._tile_products_numba import (
    bytes_of_packed,
    columns_of,
    pack,
    product_by_tiles,
)
from lookahead_hf.engines.cpu.kernels.fields import (
    BEGIN,
    COUNT,
    END,
    EPSILON,
    FACTOR,
    FIRST,
    HEADS,
    PLAN,
    ROW_SLOT,
    SEGMENT_FIELDS,
    SEGMENTS,
    SHARED,
    SIZE,
    SOURCE,
    TAIL_STARTS,
    TAILS,
    TARGET,
    WEIGHT,
    WEIGHT_2,
)
from lookahead_hf.engines.cpu.kernels.scalars import float_of, longs, narrow, numbers
from lookahead_hf.engines.cpu.kernels.tile_vectors import (
    add_like_tiles,
    interleave,
    weigh_and_split,
)
from lookahead_hf.engines.cpu.kernels.tiles import STEP, TILE, configure, mix_tiles
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

MIXED = 4
"""Tiles of a value that are summed side by side."""

_mix_all, _mix_one = mix_tiles(MIXED), mix_tiles(1)
_add_all, _add_one, _add_rest = add_like_tiles(MIXED), add_like_tiles(1), add_like_tiles(1, True)

_SINGLE, _HALF = np.float32(0.0), np.uint16(0)


@register_jitable
def attention_places(queries, slots, dim):
    """Return where a piece's parts are in scratch memory, in bytes, and where the last one ends.

    They are the scores, of `pitch` numbers per query; the weights, high and low; the values in
    pairs of slots; the queries side by side, and packed; and the results.
    """
    rows, width = (queries + TILE - 1) // TILE * TILE, (dim + TILE - 1) // TILE * TILE
    pitch = (slots + STEP - 1) // STEP * STEP + STEP
    high = rows * pitch * 4
    low = high + rows * pitch * 2
    pairs = low + rows * pitch * 2
    copied = pairs + pitch * width * 2
    packed = copied + rows * width * 2
    mixed = packed + bytes_of_packed(queries, dim)
    return pitch, width, high, low, pairs, copied, packed, mixed, mixed + rows * width * 4


@jit_inner_numbers
def attend_by_tiles(op, piece, scratch, room, columns, tiles):
    """Attend with the tokens of a segment to their slots, in the heads that share one of K and V.

    `columns` is the configuration to leave behind.
    """
    plan = longs(op[PLAN])
    shared, dim = op[SHARED], op[SIZE]
    group, stride = op[HEADS] // shared, shared * dim * 2
    segment = longs(plan[SEGMENTS] + piece // shared * SEGMENT_FIELDS * 8)
    first_token, count, begin = segment[FIRST], segment[COUNT], segment[BEGIN]
    common, queries = segment[END] - begin, count * group
    offset = segment[ROW_SLOT] * stride + piece % shared * dim * 2
    keys, values = op[WEIGHT] + offset, op[WEIGHT_2] + offset
    starts, tails = longs(plan[TAIL_STARTS] + first_token * 8), longs(plan[TAILS])
    slots = common
    for t in range(count):
        if starts[t + 1] > starts[t]:
            slots = max(slots, tails[starts[t + 1] - 1] + 1 - begin)
    places = attention_places(queries, slots, dim)
    pitch, width = places[0], places[1]
    high, low, pairs = scratch + places[2], scratch + places[3], scratch + places[4]
    copied, packed, mixed = scratch + places[5], scratch + places[6], scratch + places[7]
    at = (first_token * op[HEADS] + piece % shared * group) * dim * 2  # of the first query
    by_token = op[HEADS] * dim * 2
    for t in range(count):
        source = numbers(op[SOURCE] + at + t * by_token, _HALF)
        to = numbers(copied + t * group * dim * 2, _HALF)
        for i in range(group * dim):
            to[i] = source[i]
    pack(copied, queries, dim, packed)
    configure(room, TILE, columns_of(queries), tiles)
    first_key, first_value = keys + begin * stride, values + begin * stride
    product_by_tiles(
        first_key, stride, slots, dim, packed, queries, scratch, pitch, room, first_value, tiles
    )
    factor, limit = float_of(op[FACTOR]), float_of(op[EPSILON])
    for q in range(queries):
        tail = starts[q // group]
        length = starts[q // group + 1] - tail
        scores = numbers(scratch + q * pitch * 4, _SINGLE)
        for i in range(length):
            scores[common + i] = scores[tails[tail + i] - begin]
        scale = factor
        if limit > _SINGLE:
            scale = np.float32(1.0)
            for i in range(common + length):
                scores[i] = limit * tanh(scores[i] * factor / limit)
        a, b, seen = high + q * pitch * 2, low + q * pitch * 2, common + length
        total = weigh_and_split(scratch + q * pitch * 4, seen, scale, a, b, tiles)
        scores[pitch - 1] = np.float32(1.0) / total
    whole = common // STEP * STEP
    interleave(first_value, stride, whole // 2, dim, pairs)
    configure(room, TILE, TILE, tiles)
    by_tile = whole // 2 * 64
    for q in range(0, queries, TILE):
        a, b, place = high + q * pitch * 2, low + q * pitch * 2, 0
        while place < width:
            v, to = pairs + place // TILE * by_tile, mixed + (q * width + place) * 4
            if place + MIXED * TILE <= width:
                _mix_all(a, b, pitch * 2, v, by_tile, whole // STEP, to, width * 4, room, tiles)
                place += MIXED * TILE
            else:
                _mix_one(a, b, pitch * 2, v, by_tile, whole // STEP, to, width * 4, room, tiles)
                place += TILE
    configure(room, TILE, columns, tiles)
    for q in range(queries):
        tail = starts[q // group]
        length = common - whole + starts[q // group + 1] - tail
        weights, to = (q * pitch + whole) * 2, mixed + q * width * 4
        listed, near = plan[TAILS] + tail * 8, common - whole
        for done in range(0, length, STEP):
            a, b, some = (
                high + weights + done * 2,
                low + weights + done * 2,
                min(STEP, length - done),
            )
            _add_slots(
                a, b, values, stride, begin + whole + done, near - done, listed, some, to, dim
            )
        scale = numbers(scratch + q * pitch * 4, _SINGLE)[pitch - 1]
        out = numbers(to, _SINGLE)
        of_query = at + q // group * by_token + q % group * dim * 2
        target = numbers(op[TARGET] + of_query, _HALF)
        for i in range(dim):
            target[i] = narrow(out[i] * scale, _HALF)


@jit_inner_numbers
def _add_slots(high, low, values, stride, slot, near, listed, count, out, dim):
    """Add up the values of up to STEP slots for one query, as `add_like_tiles` describes."""
    place = 0
    while place < dim:
        v, to, rest = values + place * 2, out + place * 4, dim - place
        if rest >= MIXED * TILE:
            _add_all(high, low, v, stride, slot, near, listed, count, to, 0)
            place += MIXED * TILE
        elif rest >= TILE:
            _add_one(high, low, v, stride, slot, near, listed, count, to, 0)
            place += TILE
        else:
            _add_rest(high, low, v, stride, slot, near, listed, count, to, rest)
            place = dim

"""Products of matrices by tiles, which read a weight where the model has it, and attention.

Attention has the queries of all heads that share a head of K and V side by side. Scores are
products of keys, in place, by packed queries. Values are added up by weights of two bfloat16
numbers each, so that 16 of their bits count. A tile adds up 32 slots: numbers of even and of odd
places in a chain each, then both to the total (`add_like_tiles` does the same for the slots that
fill no tile, or that only one token sees). A token's sums are thus the same whatever is beside it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from lookahead_hf.engines.cpu.kernels import fields as f
from lookahead_hf.engines.cpu.kernels._elementwise_numba import cap_all, narrow_all, weighing
from lookahead_hf.engines.cpu.kernels.llvm import float_of, longs, numbers
from lookahead_hf.engines.cpu.kernels.tile_vectors import (
    add_like_tiles,
    interleave,
    pack_tokens,
    store_tile,
)
from lookahead_hf.engines.cpu.kernels.tiles import (
    STATE,
    STEP,
    TILE_BYTES,
    configure,
    mix_tiles,
    tile_dots,
)
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

BLOCKS = 2  # Most blocks of up to 16 tokens that rows are multiplied by at a time

CHUNK = 20 * 1024
"""Bytes of packed tokens that stay in a core's first cache while rows pass by. Tokens from the
second cache are not free: they compete with the weight on its way from memory."""

PAIR = 2 * f.TILE  # Rows that are multiplied at a time, while there are as many

GROUP = 2 * PAIR  # Most rows that pass by one chunk of tokens, whose sums are kept meanwhile

SUMS_AT = STATE + TILE_BYTES
"""Where sums are in a thread's room: behind its state and a tile for the end of rows."""

ROOM = SUMS_AT + GROUP // f.TILE * BLOCKS * TILE_BYTES
"""Bytes of a thread's room, packed tokens aside."""

_1x1, _1x2, _2x1, _2x2 = (tile_dots(rows, blocks) for rows in (1, 2) for blocks in (1, 2))


@register_jitable
def columns_of(tokens):
    """Return the tokens of a block: as even as possible, 16 at most."""
    blocks = (tokens + f.TILE - 1) // f.TILE
    return (tokens + blocks - 1) // blocks


@register_jitable
def bytes_of_block(size, columns):
    """Return the bytes of a packed block, and of what packing overwrites behind it."""
    return (size + STEP - 1) // STEP * f.TILE * columns * 4 + 64


@register_jitable
def bytes_of_packed(tokens, size):
    """Return the bytes of all packed blocks of tokens, [tokens, size]."""
    return (tokens + f.TILE - 1) // f.TILE * bytes_of_block(size, columns_of(tokens))


@jit_inner_numbers
def is_packed(tokens, size):
    """Return whether tokens are packed as they are."""
    return tokens == 1 and size % STEP == 0


@jit_inner_numbers
def pack(x, tokens, size, out):
    """Pack all blocks of tokens, [tokens, size]."""
    columns = columns_of(tokens)
    of_block = bytes_of_block(size, columns)
    for first in range(0, tokens, columns):
        count = min(columns, tokens - first)
        pack_tokens(x + first * size * 2, size * 2, count, columns, size, out)
        out += of_block


# fmt: off
@jit_inner_numbers
def _dots(w, length, x, by, blocks, columns, steps, tail, c, new, ahead, asks, rows, room, tiles):
    if rows == PAIR:
        if blocks == 1:
            _2x1(w, length, x, by, columns, steps, tail, c, new, ahead, asks, rows, room, tiles)
        else:
            _2x2(w, length, x, by, columns, steps, tail, c, new, ahead, asks, rows, room, tiles)
    elif blocks == 1:
        _1x1(w, length, x, by, columns, steps, tail, c, new, ahead, asks, rows, room, tiles)
    else:
        _1x2(w, length, x, by, columns, steps, tail, c, new, ahead, asks, rows, room, tiles)
# fmt: on


@jit_inner_numbers
def _group(
    w, length, rows, size, x, blocks, tokens, columns, out, stride, room, ahead, asks, tiles
):
    """Multiply up to GROUP rows by up to BLOCKS blocks of tokens, chunk by chunk.

    `asks` quarters of as many lines come from memory meanwhile, from `ahead` on.
    """
    by, steps = bytes_of_block(size, columns), size // STEP
    chunk = max(1, CHUNK // (blocks * columns * 64)) if rows > PAIR else max(1, steps)
    parts = max(1, (steps + chunk - 1) // chunk)
    chunk = (steps + parts - 1) // parts
    start = 0
    while True:
        count = min(chunk, steps - start)
        is_last = start + count == steps
        tail = size % STEP if is_last else 0
        is_first, at_x = 1 if start == 0 else 0, x + start * f.TILE * columns * 4
        c, row = room + SUMS_AT, 0
        while row < rows:
            height = PAIR if rows - row >= PAIR else min(f.TILE, rows - row)
            at = w + row * length + start * 64
            if height < f.TILE:
                configure(room, height, columns, tiles)
            _dots(
                at, length, at_x, by, blocks, columns, count, tail, c, is_first, ahead, asks,
                height, room, tiles,
            )  # fmt: skip
            if height < f.TILE:
                configure(room, f.TILE, columns, tiles)
            num_tiles = (height + f.TILE - 1) // f.TILE
            ahead += num_tiles * count * asks * TILE_BYTES // 4
            for tile in range(num_tiles):
                if is_last:
                    filled, first_row = min(f.TILE, height), row + tile * f.TILE
                    for block in range(blocks):
                        first = block * columns
                        to = out + (first * stride + first_row) * 4
                        some = min(columns, tokens - first)
                        store_tile(c + block * TILE_BYTES, some, to, stride * 4, filled)
                c += blocks * TILE_BYTES
            row += height
        start += count
        if is_last:
            break


@jit_inner_numbers
def product_by_tiles(w, length, rows, size, x, tokens, out, stride, room, after, tiles):
    """Multiply some rows of a weight, each `length` bytes behind the last one, by packed tokens.

    The result is [tokens, rows] float32, with `stride` numbers from one token's to the next one's.
    `configure(room, TILE, columns_of(tokens))` was called on this thread, whose room has ROOM
    bytes. At `after` is what the thread multiplies next.
    """
    columns = columns_of(tokens)
    blocks = (tokens + columns - 1) // columns
    passes = (blocks + BLOCKS - 1) // BLOCKS
    for row in range(0, rows, GROUP):
        count = min(GROUP, rows - row)
        at = w + row * length
        ahead = at + count * length if row + count < rows else after
        start = 0
        for each in range(passes):
            some = (blocks - start + passes - each - 1) // (passes - each)
            first = start * columns
            to, filled = out + (first * stride + row) * 4, min(some * columns, tokens - first)
            at_x = x + start * bytes_of_block(size, columns)
            asked = 4 * each // passes
            asks = 4 * (each + 1) // passes - asked
            _group(
                at, length, count, size, at_x, some, filled, columns, to, stride, room,
                ahead + asked * count * length // 4, asks, tiles,
            )  # fmt: skip
            start += some


MIXED = 4  # Tiles of a value that are summed side by side

_mix_all, _mix_one = mix_tiles(MIXED), mix_tiles(1)
_add_all, _add_one, _add_rest = add_like_tiles(MIXED), add_like_tiles(1), add_like_tiles(1, True)

_weigh = weighing(f.TILE, is_split=True)

_SINGLE, _HALF = np.float32(0.0), np.uint16(0)


@register_jitable
def attention_places(queries, slots, dim):
    """Return where a piece's parts are in scratch memory, in bytes, and where the last one ends.

    They are the scores, of `pitch` numbers per query; the weights, high and low; the values in
    pairs of slots; the queries side by side, and packed; and the results.
    """
    rows, width = (queries + f.TILE - 1) // f.TILE * f.TILE, (dim + f.TILE - 1) // f.TILE * f.TILE
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
    plan = longs(op[f.PLAN])
    shared, dim = op[f.SHARED], op[f.SIZE]
    group, stride = op[f.HEADS] // shared, shared * dim * 2
    segment = longs(plan[f.SEGMENTS] + piece // shared * f.SEGMENT_FIELDS * 8)
    first_token, count, begin = segment[f.FIRST], segment[f.COUNT], segment[f.BEGIN]
    common, queries = segment[f.END] - begin, count * group
    offset = segment[f.ROW_SLOT] * stride + piece % shared * dim * 2
    keys, values = op[f.WEIGHT] + offset, op[f.WEIGHT_2] + offset
    starts, tails = longs(plan[f.TAIL_STARTS] + first_token * 8), longs(plan[f.TAILS])
    slots = common
    for t in range(count):
        if starts[t + 1] > starts[t]:
            slots = max(slots, tails[starts[t + 1] - 1] + 1 - begin)
    places = attention_places(queries, slots, dim)
    pitch, width = places[0], places[1]
    high, low, pairs = scratch + places[2], scratch + places[3], scratch + places[4]
    copied, packed, mixed = scratch + places[5], scratch + places[6], scratch + places[7]
    at = (first_token * op[f.HEADS] + piece % shared * group) * dim * 2  # of the first query
    by_token = op[f.HEADS] * dim * 2
    for t in range(count):
        source = numbers(op[f.SOURCE] + at + t * by_token, _HALF)
        to = numbers(copied + t * group * dim * 2, _HALF)
        for i in range(group * dim):
            to[i] = source[i]
    pack(copied, queries, dim, packed)
    configure(room, f.TILE, columns_of(queries), tiles)
    first_key, first_value = keys + begin * stride, values + begin * stride
    product_by_tiles(
        first_key, stride, slots, dim, packed, queries, scratch, pitch, room, first_value, tiles
    )
    factor, limit = float_of(op[f.FACTOR]), float_of(op[f.EPSILON])
    for q in range(queries):
        tail = starts[q // group]
        length = starts[q // group + 1] - tail
        scores = numbers(scratch + q * pitch * 4, _SINGLE)
        for i in range(length):
            scores[common + i] = scores[tails[tail + i] - begin]
        a, b, seen = high + q * pitch * 2, low + q * pitch * 2, common + length
        scale = cap_all(scratch + q * pitch * 4, seen, factor, limit)
        total = _weigh(scratch + q * pitch * 4, seen, scale, a, b)
        scores[pitch - 1] = np.float32(1.0) / total
    whole = common // STEP * STEP
    interleave(first_value, stride, whole // 2, dim, pairs)
    configure(room, f.TILE, f.TILE, tiles)
    by_tile = whole // 2 * 64
    for q in range(0, queries, f.TILE):
        a, b, place = high + q * pitch * 2, low + q * pitch * 2, 0
        while place < width:
            v, to = pairs + place // f.TILE * by_tile, mixed + (q * width + place) * 4
            if place + MIXED * f.TILE <= width:
                _mix_all(a, b, pitch * 2, v, by_tile, whole // STEP, to, width * 4, room, tiles)
                place += MIXED * f.TILE
            else:
                _mix_one(a, b, pitch * 2, v, by_tile, whole // STEP, to, width * 4, room, tiles)
                place += f.TILE
    configure(room, f.TILE, columns, tiles)
    for q in range(queries):
        tail = starts[q // group]
        length = common - whole + starts[q // group + 1] - tail
        weights, to = (q * pitch + whole) * 2, mixed + q * width * 4
        listed, near = plan[f.TAILS] + tail * 8, common - whole
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
        for i in range(dim):
            out[i] *= scale
        narrow_all(to, dim, op[f.TARGET] + of_query, _HALF)


@jit_inner_numbers
def _add_slots(high, low, values, stride, slot, near, listed, count, out, dim):
    """Add up the values of up to STEP slots for one query, as `add_like_tiles` describes."""
    place = 0
    while place < dim:
        v, to, rest = values + place * 2, out + place * 4, dim - place
        if rest >= MIXED * f.TILE:
            _add_all(high, low, v, stride, slot, near, listed, count, to, 0)
            place += MIXED * f.TILE
        elif rest >= f.TILE:
            _add_one(high, low, v, stride, slot, near, listed, count, to, 0)
            place += f.TILE
        else:
            _add_rest(high, low, v, stride, slot, near, listed, count, to, rest)
            place = dim

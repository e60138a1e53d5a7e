"""Products of matrices by tiles, which read a weight where the model has it, and attention.

Attention has the queries of all heads that share a head of K and V side by side. Scores are
products of keys, in place, by packed queries. Values are added up by weights of two bfloat16
numbers each, which keep them to 2^-15. A tile adds up 32 slots: numbers of even and of odd places
in a chain each, then both to the total. Slots have their places in the order of what a token sees,
so its sums are the same whatever is beside it. Only a value that is not finite makes NaN of tokens
that do not see it, as it does in torch's attention; such a step runs again without its draft.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from lookahead_hf.engines.cpu.kernels import fields as f
from lookahead_hf.engines.cpu.kernels._elementwise_numba import cap_all, narrow_all
from lookahead_hf.engines.cpu.kernels.llvm import float_of, longs, numbers
from lookahead_hf.engines.cpu.kernels.tile_vectors import (
    find_largest,
    pack_tokens,
    store_tile,
    turn,
    weights,
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
def product_by_tiles(w, rows, size, x, tokens, out, stride, room, after, tiles):
    """Multiply some rows of a weight by packed tokens.

    The result is [tokens, rows] float32, with `stride` numbers from one token's to the next one's.
    `configure(room, TILE, columns_of(tokens))` was called on this thread, whose room has ROOM
    bytes. At `after` is what the thread multiplies next.
    """
    columns = columns_of(tokens)
    blocks = (tokens + columns - 1) // columns
    passes, length = (blocks + BLOCKS - 1) // BLOCKS, size * 2
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
FEW = 4  # Queries up to which vectors have scores of several slots

_weigh, _weigh_few, _weigh_seen = weights(), weights(queries=FEW), weights(is_partial=True)

SLOTS = 128  # Slots whose values and weights stay in a core's first cache

NOTES = 384
"""Bytes of what is known of 16 queries, beside their results: how many slots each sees behind the
whole tiles of common ones (int32), the largest scores, and sums of weights, four of each query."""

_SINGLE, _WORD, _HALF = np.float32(0.0), np.int32(0), np.uint16(0)


@register_jitable
def attention_places(queries, slots, dim):
    """Return the width of a result, and where a piece's parts are in scratch memory, in bytes.

    Behind the scores, [blocks of 16 queries][slots][16], are the queries side by side, and packed;
    values as tiles; weights; notes and results as tiles; results by query; zeros, and addresses of
    values behind them. The last number is where all of that ends.
    """
    rows, width = (slots + STEP - 1) // STEP * STEP, (dim + f.TILE - 1) // f.TILE * f.TILE
    blocks = (queries + f.TILE - 1) // f.TILE
    copied = blocks * rows * 64
    packed = copied + (queries * dim * 2 + 63) // 64 * 64
    turned = packed + bytes_of_block(dim, f.TILE)
    split = turned + rows * width * 2
    notes = split + rows * 64
    mixed = notes + blocks * (NOTES + width * 64)
    zeros = mixed + width * 64
    return width, copied, packed, turned, split, notes, mixed, zeros, zeros + width * 2 + rows * 8


@jit_inner_numbers
def attend_by_tiles(op, piece, scratch, room, left, tiles):
    """Attend with the tokens of a segment to their slots, in the heads that share one of K and V.

    Whole tiles of slots that all tokens see come first. Where tails are a chain, all others follow
    at once, those that a token does not see with the weight 0; else the tail of each token. The
    function leaves the configuration of `left` columns behind.
    """
    plan = longs(op[f.PLAN])
    shared, dim = op[f.SHARED], op[f.SIZE]
    group, stride = op[f.HEADS] // shared, shared * dim * 2
    segment = longs(plan[f.SEGMENTS] + piece // shared * f.SEGMENT_FIELDS * 8)
    first_token, count, begin = segment[f.FIRST], segment[f.COUNT], segment[f.BEGIN]
    common, queries = segment[f.END] - begin, count * group
    offset = (segment[f.ROW_SLOT] + begin) * stride + piece % shared * dim * 2
    keys, values = op[f.WEIGHT] + offset, op[f.WEIGHT_2] + offset
    starts, tails = longs(plan[f.TAIL_STARTS] + first_token * 8), longs(plan[f.TAILS])
    slots, longest, is_chain = common, 0, True
    for t in range(count):
        length = starts[t + 1] - starts[t]
        if length > 0:
            end = tails[starts[t + 1] - 1] + 1 - begin
            is_chain = is_chain and end == common + length
            if end > slots:
                slots, longest = end, t
    whole, rows = common // STEP * STEP, (slots + STEP - 1) // STEP * STEP
    places, blocks = attention_places(queries, slots, dim), (queries + f.TILE - 1) // f.TILE
    width, copied, packed = places[0], scratch + places[1], scratch + places[2]
    turned, split, notes = scratch + places[3], scratch + places[4], scratch + places[5]
    mixed, zeros, of_notes = scratch + places[6], scratch + places[7], NOTES + width * 64
    at = (first_token * op[f.HEADS] + piece % shared * group) * dim * 2  # of the first query
    by_token = op[f.HEADS] * dim * 2
    for t in range(count):
        source = numbers(op[f.SOURCE] + at + t * by_token, _HALF)
        to = numbers(copied + t * group * dim * 2, _HALF)
        for i in range(group * dim):
            to[i] = source[i]
    for i in range(dim):
        numbers(zeros, _HALF)[i] = _HALF
    configure(room, f.TILE, f.TILE, tiles)
    factor, listed = np.float32(0.0), longs(zeros + width * 2)
    for b in range(blocks):
        some, note, first = min(f.TILE, queries - b * f.TILE), notes + b * of_notes, b * rows * 64
        pack_tokens(copied + b * f.TILE * dim * 2, dim * 2, some, f.TILE, dim, packed)
        _score(keys, stride, slots, dim, packed, scratch + first, room, tiles)
        score, known = numbers(scratch + first, _SINGLE), numbers(note, _SINGLE)
        for i in range(of_notes // 4):
            known[i] = _SINGLE
        for q in range(some):
            tail = starts[(b * f.TILE + q) // group]
            for i in range(0 if is_chain else starts[(b * f.TILE + q) // group + 1] - tail):
                slot = tails[tail + i] - begin
                score[(common + i) * f.TILE + q] = score[slot * f.TILE + q]
        factor = cap_all(
            scratch + first, rows * f.TILE, float_of(op[f.FACTOR]), float_of(op[f.EPSILON])
        )
        _see(note, b, queries, group, starts, common - whole, -1)
        find_largest(scratch + first, whole, rows, note)
    groups = (whole + SLOTS - 1) // SLOTS
    for part in range(groups + (1 if is_chain else count)):
        t, start = part - groups, min(part * SLOTS, whole)
        near, length = min(SLOTS, whole - start), min(SLOTS, whole - start)
        if part >= groups:
            t, near = longest if is_chain else t, common - whole
            length = near + starts[t + 1] - starts[t]
        some = (length + STEP - 1) // STEP * STEP
        for i in range(some):
            listed[i] = zeros
            if i < length:
                slot = start + i if i < near else tails[starts[t] + i - near] - begin
                listed[i] = values + slot * stride
        turn(zeros + width * 2, some, dim, turned)
        for b in range(blocks):
            score, note = scratch + (b * rows + start) * 64, notes + b * of_notes
            is_left = b * f.TILE < (t + 1) * group and t * group < (b + 1) * f.TILE
            if part < groups and queries > FEW:
                _weigh(score, some, note, factor, split)
            elif part < groups:
                _weigh_few(score, some, note, factor, split)
            elif is_chain or is_left:
                if not is_chain:
                    _see(note, b, queries, group, starts, near, t)
                _weigh_seen(score, some, note, factor, split)
            if part < groups or is_chain or is_left:
                _mix(split, turned, width, some, note + NOTES, room, tiles)
    for b in range(blocks):
        some, note = min(f.TILE, queries - b * f.TILE), notes + b * of_notes
        for place in range(0, width, f.TILE):
            store_tile(note + NOTES + place * 64, some, mixed + place * 4, width * 4, f.TILE)
        for q in range(some):
            out, query, total = numbers(mixed + q * width * 4, _SINGLE), b * f.TILE + q, _SINGLE
            for i in range(2 * f.TILE + q, 6 * f.TILE, f.TILE):
                total += numbers(note, _SINGLE)[i]
            for i in range(dim):
                out[i] /= total
            target = op[f.TARGET] + at + query // group * by_token + query % group * dim * 2
            narrow_all(mixed + q * width * 4, dim, target, _HALF)
    configure(room, f.TILE, left, tiles)


@jit_inner_numbers
def _see(note, block, queries, group, starts, near, only):
    """Note how many slots, `near` ones and its tail, each query of a block sees.

    If `only` is not negative, it is the only token that sees any.
    """
    ends = numbers(note, _WORD)
    for q in range(f.TILE):
        t = (block * f.TILE + q) // group
        ends[q] = _WORD
        if block * f.TILE + q < queries and (only < 0 or only == t):
            ends[q] = np.int32(near + starts[t + 1] - starts[t])


@jit_inner_numbers
def _score(keys, stride, slots, dim, packed, out, room, tiles):
    """Write the scores of 16 queries for some slots, [slots][16]."""
    slot, steps, tail = 0, dim // STEP, dim % STEP
    while slot < slots:
        height = PAIR if slots - slot >= PAIR else min(f.TILE, slots - slot)
        if height < f.TILE:
            configure(room, height, f.TILE, tiles)
        key, to = keys + slot * stride, out + slot * 64
        _dots(key, stride, packed, 0, 1, f.TILE, steps, tail, to, 1, 0, 0, height, room, tiles)
        slot += height
        if height < f.TILE:
            configure(room, f.TILE, f.TILE, tiles)


@jit_inner_numbers
def _mix(weights, values, width, slots, out, room, tiles):
    """Add weighted values to tiles, [width / 16] of [16 numbers][16 queries]."""
    place, by = 0, width * 64
    while place < width:
        v, to = values + place * 64, out + place * 64
        if place + MIXED * f.TILE <= width:
            _mix_all(weights, v, by, slots // STEP, to, room, tiles)
            place += MIXED * f.TILE
        else:
            _mix_one(weights, v, by, slots // STEP, to, room, tiles)
            place += f.TILE

"""Products of matrices by tiles, which read a weight where the model has it, and attention.

Attention has the queries of all heads that share a head of K and V side by side. Scores are
products of keys, in place, by packed queries. Values are added up by weights of two bfloat16
numbers each, which keep them to 2^-15. A tile adds up 32 slots: numbers of even and of odd places
in a chain each, then both to the total. Slots have their places in the order of what a token sees,
so its sums are the same whatever is beside it. A key that a token does not see has no effect; nor
has a value, unless it is not finite: that makes NaN, as it does in torch's attention, and such a
step runs again without its draft.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from lookahead_hf.engines.cpu.kernels import fields as f
from lookahead_hf.engines.cpu.kernels._elementwise_numba import activate, cap_all
from lookahead_hf.engines.cpu.kernels.llvm import float_of, longs, numbers, wide
from lookahead_hf.engines.cpu.kernels.tile_vectors import (
    divide,
    find_largest,
    pack_tokens,
    store_packed,
    store_tokens,
    turn,
    weigh,
)
from lookahead_hf.engines.cpu.kernels.tiles import (
    MIXED,
    STATE,
    STEP,
    TILE_BYTES,
    configure,
    mix,
    tile_dots,
)
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

_SINGLE, _HALF, _ONE = np.float32(0.0), np.uint16(0), np.float32(1.0)
_INFINITE = np.float32(np.inf)

BLOCKS = 2  # Most blocks of up to 16 tokens that rows are multiplied by at a time
PAIR = 2 * f.TILE  # Rows that are multiplied at a time, while there are as many

# In a thread's room, a tile for tails and the addresses of 16 results are behind the state.
TARGETS_AT = STATE + TILE_BYTES
ROOM = TARGETS_AT + f.TILE * 8  # Bytes of a thread's room, packed tokens aside

_1x1, _1x2, _2x1, _2x2 = (tile_dots(rows, blocks) for rows in (1, 2) for blocks in (1, 2))


@register_jitable
def blocks_of(tokens):
    """Return the number of blocks of tokens."""
    return (tokens + f.TILE - 1) // f.TILE


@register_jitable
def columns_of(tokens):
    """Return the tokens of a block: as even as possible, 16 at most."""
    return (tokens + blocks_of(tokens) - 1) // blocks_of(tokens)


@register_jitable
def bytes_of_block(size, columns):
    """Return the bytes of a packed block, and of what packing overwrites behind it."""
    return (size + STEP - 1) // STEP * f.TILE * columns * 4 + 64


@register_jitable
def bytes_of_packed(tokens, size):
    """Return the bytes of all packed blocks of tokens, [tokens, size]."""
    return blocks_of(tokens) * bytes_of_block(size, columns_of(tokens))


@jit_inner_numbers
def is_packed(op, tokens):
    """Return whether what a linear layer reads is packed as it is."""
    return op[f.PACKED] or (tokens == 1 and op[f.SIZE] % STEP == 0)


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
def _dots(w, length, x, by, blocks, columns, steps, tail, c, gap, ahead, asks, rows, room, tiles):
    if rows == PAIR:
        if blocks == 1:
            _2x1(w, length, x, by, columns, steps, tail, c, gap, ahead, asks, rows, room, tiles)
        else:
            _2x2(w, length, x, by, columns, steps, tail, c, gap, ahead, asks, rows, room, tiles)
    elif blocks == 1:
        _1x1(w, length, x, by, columns, steps, tail, c, gap, ahead, asks, rows, room, tiles)
    else:
        _1x2(w, length, x, by, columns, steps, tail, c, gap, ahead, asks, rows, room, tiles)
# fmt: on


@jit_inner_numbers
def _multiply(w, rows, size, x, tokens, out, room, ahead, tiles):
    """Multiply up to PAIR rows by packed tokens, BLOCKS blocks at a time.

    Their sums are tiles, [blocks][2 tiles of rows]. Meanwhile it asks memory for as many lines as
    the rows have, from `ahead` on.
    """
    columns, blocks, length, asked = columns_of(tokens), blocks_of(tokens), size * 2, 0
    by = bytes_of_block(size, columns)
    for block in range(0, blocks, BLOCKS):
        some, c = min(BLOCKS, blocks - block), out + block * 2 * TILE_BYTES
        asks = 4 * (block + some) // blocks - asked
        for row in range(0, rows, PAIR if rows == PAIR else f.TILE):
            height, at = PAIR if rows == PAIR else min(f.TILE, rows - row), w + row * length
            if height < f.TILE:
                configure(room, height, columns, tiles)
            _dots(
                at, length, x + block * by, by, some, columns, size // STEP, size % STEP, c,
                2 * TILE_BYTES, ahead, asks, height, room, tiles,
            )  # fmt: skip
            if height < f.TILE:
                configure(room, f.TILE, columns, tiles)
            ahead += height * length * asks // 4
            c += TILE_BYTES
        asked += asks


@jit_inner_numbers
def multiply_by_tiles(op, tokens, piece, x, scratch, room, after, tiles):
    """Carry out a piece of a linear layer or of a gated unit with packed tokens.

    `configure(room, TILE, columns_of(tokens))` was called on this thread, whose room has ROOM
    bytes. At `after` is what the thread multiplies next, or 0 if it is the rows that follow.
    """
    size, first, blocks = op[f.SIZE], piece * op[f.PIECE], blocks_of(tokens)
    length, last = size * 2, min(first + op[f.PIECE], op[f.OUTPUTS])
    gated = blocks * 2 * TILE_BYTES if op[f.KIND] == f.GATED else 0
    for row in range(first, last, PAIR):
        rows, at = min(PAIR, last - row), row * length
        w, w2 = op[f.WEIGHT] + at, op[f.WEIGHT_2] + at
        ahead = after if after and row + rows == last else w + rows * length
        _multiply(w, rows, size, x, tokens, scratch, room, w2 if gated else ahead, tiles)
        if gated:
            _multiply(w2, rows, size, x, tokens, scratch + gated, room, ahead, tiles)
        _finish(op, row, rows, scratch, gated, tokens, room)


@jit_inner_numbers
def _finish(op, first, rows, sums, gated, tokens, room):
    """Write, or add, the results of some rows; other sums are `gated` bytes behind, if not 0."""
    columns, blocks, mode = columns_of(tokens), blocks_of(tokens), op[f.MODE]
    targets, stride, of_tile = room + TARGETS_AT, op[f.OUTPUTS], f.TILE * columns
    for block in range(blocks):
        token, c = block * columns, sums + block * 2 * TILE_BYTES
        for row in range(0, rows, f.TILE):
            height, at = min(f.TILE, rows - row), c + row // f.TILE * TILE_BYTES
            _add_bias(at, op[f.BIAS], first + row, height, columns)
            if gated:
                _add_bias(at + gated, op[f.BIAS_2], first + row, height, columns)
            if op[f.FLAVOUR] != f.NO_ACTIVATION:
                by = at + gated if gated else 0
                activate(at, by, height * columns, op[f.FLAVOUR], _HALF)
        if mode == f.PACK:
            for i in range(rows * columns, PAIR * columns):
                numbers(c + i // of_tile * TILE_BYTES, _SINGLE)[i % of_tile] = _SINGLE
            to = op[f.TARGET] + block * bytes_of_block(stride, columns)
            store_packed(c, columns, to + first // STEP * of_tile * 4)
        else:
            count, adds = min(columns, tokens - token), mode == f.ADD
            for t in range(token, token + count):
                to = longs(longs(op[f.PLAN])[f.SLOTS])[t] if mode == f.TO_SLOTS else t
                longs(targets)[t - token] = op[f.TARGET] + (to * stride + first) * 2
            store_tokens(c, columns, count, targets, rows, adds, float_of(op[f.FACTOR]))


@jit_inner_numbers
def _add_bias(sums, bias, first, rows, columns):
    if bias:
        total, b = numbers(sums, _SINGLE), numbers(bias + first * 2, _HALF)
        for row in range(rows):
            for i in range(row * columns, (row + 1) * columns):
                total[i] += wide(b[row])


NOTES = 384
"""Bytes of notes on 16 queries, before their results: how many slots each sees, later the largest
scores that the tail of a token is weighed by; the largest scores; four sums of weights of each."""


@register_jitable
def attention_places(slots, dim):
    """Return the width of a result, and where a piece's parts are in scratch memory, in bytes.

    Behind the scores, [BLOCKS][slots][16 queries], are these queries side by side, and packed;
    values as tiles; weights; notes and results as whole tiles, as many as are mixed at a time;
    zeros, and addresses of values behind them. The last number is where all of that ends.
    """
    rows, width = (slots + STEP - 1) // STEP * STEP, MIXED * f.TILE
    width = (dim + width - 1) // width * width
    copied = BLOCKS * rows * 64
    packed = copied + BLOCKS * f.TILE * dim * 2
    turned = packed + BLOCKS * bytes_of_block(dim, f.TILE)
    split = turned + rows * width * 2
    notes = split + rows * 64
    zeros = notes + BLOCKS * (NOTES + width * 64)
    return width, copied, packed, turned, split, notes, zeros, zeros + width * 2 + rows * 8


@jit_inner_numbers
def attend_by_tiles(op, piece, scratch, room, left, tiles):
    """Attend with the tokens of a segment to their slots, in the heads that share one of K and V.

    Whole tiles of slots that all tokens see come first. Where tails are a chain, the others are
    among them, with the weight 0 for tokens that do not see them; else the tail of each token
    follows by itself. The function leaves the configuration of `left` columns behind.
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
    slots, is_chain = common, True
    for t in range(count):
        length = starts[t + 1] - starts[t]
        if length > 0:
            end = tails[starts[t + 1] - 1] + 1 - begin
            is_chain = is_chain and end == common + length
            slots = max(slots, end)
    rows = (slots + STEP - 1) // STEP * STEP
    whole = rows if is_chain else common // STEP * STEP
    places, of_block = attention_places(slots, dim), bytes_of_block(dim, f.TILE)
    width, copied, packed = places[0], scratch + places[1], scratch + places[2]
    turned, split, notes = scratch + places[3], scratch + places[4], scratch + places[5]
    zeros, of_notes = scratch + places[6], NOTES + width * 64
    cap, scale = float_of(op[f.EPSILON]), float_of(op[f.FACTOR])
    at = (first_token * op[f.HEADS] + piece % shared * group) * dim * 2  # of the first query
    by_token = op[f.HEADS] * dim * 2
    for i in range(dim):
        numbers(zeros, _HALF)[i] = _HALF
    configure(room, f.TILE, f.TILE, tiles)
    listed = longs(zeros + width * 2)
    for i in range(whole):
        listed[i] = values + i * stride if i < slots else zeros
    turn(zeros + width * 2, whole, dim, width * 64, turned)
    for first in range(0, queries, BLOCKS * f.TILE):
        last, blocks = min(queries, first + BLOCKS * f.TILE), 0
        for query in range(first, last):
            source = op[f.SOURCE] + at + query // group * by_token + query % group * dim * 2
            to = numbers(copied + (query - first) * dim * 2, _HALF)
            for i in range(dim):
                to[i] = numbers(source, _HALF)[i]
        for start in range(first, last, f.TILE):
            some, x = min(f.TILE, last - start), copied + (start - first) * dim * 2
            pack_tokens(x, dim * 2, some, f.TILE, dim, packed + blocks * of_block)
            blocks += 1
        _score(keys, stride, slots, dim, packed, blocks, scratch, rows * 64, room, tiles)
        factor = cap_all(scratch, blocks * rows * f.TILE, scale, cap)
        for b in range(blocks):
            note, at_scores = notes + b * of_notes, scratch + b * rows * 64
            known, score = numbers(note, _SINGLE), numbers(at_scores, _SINGLE)
            for i in range(of_notes // 4):
                known[i] = _SINGLE
            for query in range(first + b * f.TILE, min(last, first + b * f.TILE + f.TILE)):
                t, q = query // group, query % f.TILE
                end = common + starts[t + 1] - starts[t]
                known[q] = end
                for i in range(end if is_chain else common, end):
                    slot = tails[starts[t] + i - common] - begin
                    score[i * f.TILE + q] = score[slot * f.TILE + q]
            for i in range(common, rows):
                for q in range(f.TILE):
                    seen = score[i * f.TILE + q]
                    score[i * f.TILE + q] = seen if np.float32(i) < known[q] else -_INFINITE
            find_largest(at_scores, rows, note + 64)
            _weigh(at_scores, whole, note + 64, note, factor, split, turned, width, room, tiles)
        tailed = 0 if is_chain else last  # queries up to which tails follow
        for t in range(first // group, (tailed + group - 1) // group):
            length, at_tail = starts[t + 1] - starts[t] + common - whole, starts[t] + whole - common
            some, values_of = (length + STEP - 1) // STEP * STEP, turned + whole * width * 2
            for i in range(some):
                listed[i] = zeros
                if i < length:
                    slot = whole + i if whole + i < common else tails[at_tail + i] - begin
                    listed[i] = values + slot * stride
            turn(zeros + width * 2, some, dim, width * 64, values_of)
            for b in range(blocks):
                note, score = notes + b * of_notes, scratch + (b * rows + whole) * 64
                known, q = numbers(note, _SINGLE), t * group - first - b * f.TILE
                for i in range(f.TILE):
                    known[i] = known[f.TILE + i] if q <= i < q + group else _INFINITE
                if -group < q < f.TILE:
                    _weigh(score, some, note, note, factor, split, values_of, width, room, tiles)
        for b in range(blocks):
            mixed, start = notes + b * of_notes + NOTES, first + b * f.TILE
            some, targets = min(f.TILE, last - start), longs(room + TARGETS_AT)
            divide(mixed - NOTES, mixed, width)
            for place in range(0, dim, PAIR):
                for q in range(some):
                    to = op[f.TARGET] + at + place * 2 + (start + q) // group * by_token
                    targets[q] = to + (start + q) % group * dim * 2
                c, numbers_left = mixed + place * 64, min(PAIR, dim - place)
                store_tokens(c, f.TILE, some, room + TARGETS_AT, numbers_left, False, _ONE)
    configure(room, f.TILE, left, tiles)


@jit_inner_numbers
def _weigh(scores, rows, most, note, factor, split, values, width, room, tiles):
    """Weigh scores of 16 queries, and add values by the weights to their results."""
    to, chunks, by, at_once = note + NOTES, rows // STEP, width * 64, MIXED * f.TILE
    weigh(scores, chunks, most, note + 128, factor, split, values, by, to, room, tiles)
    for place in range(at_once, width, at_once):
        mix(split, values + place * 64, by, chunks, to + place * 64, room, tiles)


@jit_inner_numbers
def _score(keys, stride, slots, dim, packed, blocks, out, gap, room, tiles):
    """Write the scores of blocks of 16 queries for some slots, [slots][16], at distances `gap`."""
    slot, steps, tail, by = 0, dim // STEP, dim % STEP, bytes_of_block(dim, f.TILE)
    while slot < slots:
        height = PAIR if slots - slot >= PAIR else min(f.TILE, slots - slot)
        if height < f.TILE:
            configure(room, height, f.TILE, tiles)
        _dots(
            keys + slot * stride, stride, packed, by, blocks, f.TILE, steps, tail, out + slot * 64,
            gap, 0, 0, height, room, tiles,
        )  # fmt: skip
        slot += height
        if height < f.TILE:
            configure(room, f.TILE, f.TILE, tiles)

"""Attention of the tokens of a block to the slots of a cache."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.engines.cpu.kernels._elementwise_numba import exp, tanh
from lookahead_hf.engines.cpu.kernels._products_numba import dot, rows_by_tokens, widen
from lookahead_hf.engines.cpu.kernels.fields import (
    BEGIN,
    COUNT,
    END,
    EPSILON,
    FACTOR,
    FIRST,
    HEADS,
    PITCH,
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
from lookahead_hf.engines.cpu.kernels.llvm import LANES
from lookahead_hf.engines.cpu.kernels.scalars import float_of, longs, narrow, numbers, width_of
from lookahead_hf.engines.cpu.kernels.vectors import ROWS, is_widened, largest_of, mix, sum_of
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

MIXED = 4
"""Vectors of a value that are summed side by side."""

QUERIES = 4 if LANES == 16 else 2
"""Queries whose values are summed side by side."""

_mix_queries, _mix_one = mix(QUERIES, MIXED), mix(1, MIXED)
_mix_vector, _mix_rest = mix(1, 1), mix(1, 1, is_partial=True)

_SINGLE = np.float32(0.0)


@jit_inner_numbers
def attend(op, piece, scratch, kind):
    """Attend with the tokens of a segment to their slots, in one head.

    A token's scores are in the order of the slots that it sees, wherever unseen slots are, so that
    its sums are the same in every block.
    """
    plan, width = longs(op[PLAN]), width_of(kind)
    heads, dim, stride = op[HEADS], op[SIZE], op[SHARED] * op[SIZE]
    segment = longs(plan[SEGMENTS] + piece // heads * SEGMENT_FIELDS * 8)
    head = piece % heads
    first_token, count = segment[FIRST], segment[COUNT]
    begin, common = segment[BEGIN], segment[END] - segment[BEGIN]
    offset = (segment[ROW_SLOT] * stride + head * op[SHARED] // heads * dim) * width
    keys, values = op[WEIGHT] + offset, op[WEIGHT_2] + offset
    queries, by_query = op[SOURCE] + (first_token * heads + head) * dim * width, heads * dim
    pitch = plan[PITCH]
    starts, tails = longs(plan[TAIL_STARTS]), longs(plan[TAILS])
    totals = scratch + count * pitch * 4
    out = totals + 64 * 4
    in_query = width
    if is_widened(kind):
        source, by_query, in_query = queries, dim, 4
        queries = out + count * dim * 4
        for t in range(count):
            widen(source + t * heads * dim * width, dim, queries + t * dim * 4, kind)
    whole = common // ROWS * ROWS
    at = keys + begin * stride * width
    for slot in range(0, whole, ROWS):
        key, to = at + slot * stride * width, scratch + slot * 4
        rows_by_tokens(key, stride, queries, by_query, dim, count, to, pitch, kind)
    total, mixed = numbers(totals, _SINGLE), numbers(out, _SINGLE)
    for i in range(count * dim):
        mixed[i] = np.float32(0.0)
    factor, limit = float_of(op[FACTOR]), float_of(op[EPSILON])
    for t in range(count):
        query, scores = queries + t * by_query * in_query, scratch + t * pitch * 4
        for slot in range(whole, common):
            dot(at + slot * stride * width, query, dim, scores + slot * 4, kind)
        tail = starts[first_token + t]
        length = starts[first_token + t + 1] - tail
        for i in range(length):
            to = scores + (common + i) * 4
            dot(keys + tails[tail + i] * stride * width, query, dim, to, kind)
        total[t] = np.float32(1.0) / _weigh(scores, common + length, factor, limit)
    _mix_all(scratch, pitch, values, stride, begin, common, count, dim, out, kind)
    for t in range(count):
        tail = starts[first_token + t]
        length = starts[first_token + t + 1] - tail
        scores, to = scratch + (t * pitch + common) * 4, out + t * dim * 4
        listed = plan[TAILS] + tail * 8
        _mix_listed(scores, values, stride, listed, length, dim, to, kind)
        attended = numbers(op[TARGET] + ((first_token + t) * heads + head) * dim * width, kind)
        for i in range(dim):
            attended[i] = narrow(mixed[t * dim + i] * total[t], kind)


@jit_inner_numbers
def _weigh(address, count, factor, limit):
    """Turn products of a query and keys into unnormalised weights; return their sum."""
    scores = numbers(address, _SINGLE)
    if limit > np.float32(0.0):
        for s in range(count):
            scores[s] = limit * tanh(scores[s] * factor / limit)
    else:
        for s in range(count):
            scores[s] = scores[s] * factor
    largest = largest_of(address, count, _SINGLE)
    for s in range(count):
        below = scores[s] - largest
        scores[s] = np.float32(0.0) if below < np.float32(-87.0) else exp(below)
    return sum_of(address, count, _SINGLE)


@jit_inner_numbers
def _mix_all(scratch, pitch, values, stride, begin, common, count, dim, out, kind):
    """Add up the values of the slots that all tokens of a segment see."""
    width = width_of(kind)
    first = values + begin * stride * width
    place = 0
    while place + MIXED * LANES <= dim:
        t = 0
        while t < count:
            scores, to = scratch + t * pitch * 4, out + (t * dim + place) * 4
            v = first + place * width
            if count - t >= QUERIES:
                _mix_queries(scores, pitch, v, stride, 0, common, to, dim, 0, kind)
                t += QUERIES
            else:
                _mix_one(scores, pitch, v, stride, 0, common, to, dim, 0, kind)
                t += 1
        place += MIXED * LANES
    for t in range(count):
        scores, to = scratch + t * pitch * 4, out + t * dim * 4
        _mix_narrow(scores, first, stride, 0, common, place, dim, to, kind)


@jit_inner_numbers
def _mix_listed(scores, values, stride, slots, count, dim, out, kind):
    """Add up the values of listed slots for one token."""
    place = 0
    while place + MIXED * LANES <= dim:
        to, v = out + place * 4, values + place * width_of(kind)
        _mix_one(scores, 0, v, stride, slots, count, to, 0, 0, kind)
        place += MIXED * LANES
    _mix_narrow(scores, values, stride, slots, count, place, dim, out, kind)


@jit_inner_numbers
def _mix_narrow(scores, values, stride, slots, count, place, dim, out, kind):
    """Add up the numbers from `place` on, fewer than are summed side by side."""
    width = width_of(kind)
    while place + LANES <= dim:
        to, v = out + place * 4, values + place * width
        _mix_vector(scores, 0, v, stride, slots, count, to, 0, 0, kind)
        place += LANES
    if place < dim:
        to, v = out + place * 4, values + place * width
        _mix_rest(scores, 0, v, stride, slots, count, to, 0, dim - place, kind)

"""Attention of the tokens of a block to the slots of a cache, and its plan: what they see."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.engines.cpu.kernels import fields as f
from lookahead_hf.engines.cpu.kernels._elementwise_numba import cap_all, narrow_all, weigh_all
from lookahead_hf.engines.cpu.kernels._vectors_numba import (
    ROWS,
    dot,
    is_widened,
    largest_of,
    mix,
    rows_by_tokens,
    sum_of,
    widen,
)
from lookahead_hf.engines.cpu.kernels.llvm import LANES, float_of, longs, numbers, width_of
from lookahead_hf.ngram_pool.jit import jit, jit_inner, jit_inner_numbers


@jit
def plan_rows(
    parents, counts, lengths, query, least, columns, row_slots, first_token, most, segments,
    tail_starts, tails,
):  # fmt: skip
    """Write the segments and tails of the tokens of some rows.

    A token sees one run of slots, and single slots behind it, its tail. Tokens whose runs begin at
    the same slot form a segment, which covers what all of them see of it.

    Args:
        parents: Index of each token's parent in its row, -1 for none, [rows, width].
        counts: Tokens of each row, [rows]; the others are padding.
        lengths: Slots of each row before the block, [rows].
        query: Columns of the tokens, [rows, width].
        least: Least column that each token sees, [rows, width]; empty if they see all.
        columns: Columns of the slots before the block, ascending, [rows, slots or more].
        row_slots: The first slot of each row, [rows].
        first_token: The first token of the first row in the block.
        most: Most tokens of a segment.
        segments: Where segments are written, [tokens, fields].
        tail_starts: Where tails begin and end, [tokens of the block + 1].
        tails: Where tails are written.

    Returns:
        How many segments there are, and the most slots that a token sees.
    """
    num_segments, token, pitch = 0, first_token, 0
    begins, ends = np.empty(parents.shape[1], np.int64), np.empty(parents.shape[1], np.int64)
    for row in range(len(counts)):
        length, above, all_seen = lengths[row], parents[row], len(least) == 0
        for t in range(counts[row]):
            begin = 0
            if not all_seen:
                begin = _first_at_least(columns[row], length, least[row, t])
            first, lead = t, t + 1
            while above[first] >= 0 and (all_seen or query[row, above[first]] >= least[row, t]):
                if above[first] != first - 1:
                    lead = above[first] + 1
                first = above[first]
            if begin < length:
                begins[t], ends[t] = begin, length + (lead if first == 0 else 0)
            else:
                begins[t], ends[t] = length + first, length + lead
        at = 0
        while at < counts[row]:
            begin, last = begins[at], at + 1
            while last < counts[row] and begins[last] == begin:
                last += 1
            while at < last:
                parts = (last - at + most - 1) // most
                count = (last - at + parts - 1) // parts
                end = ends[at]
                for t in range(at + 1, at + count):
                    end = min(end, ends[t])
                segment = segments[num_segments]
                segment[f.FIRST], segment[f.COUNT] = token, count
                segment[f.ROW_SLOT] = row_slots[row]
                segment[f.BEGIN], segment[f.END] = begin, end
                num_segments += 1
                for t in range(at, at + count):
                    num_after, node = 0, t
                    while node >= 0 and length + node >= max(begin, end):
                        num_after += 1
                        node = above[node]
                    place, node = tail_starts[token] + num_after, t
                    pitch = max(pitch, end - begin + num_after)
                    token += 1
                    tail_starts[token] = place
                    for before in range(1, num_after + 1):
                        tails[place - before] = length + node
                        node = above[node]
                at += count
    return num_segments, pitch


@jit_inner
def _first_at_least(columns, length, least):
    """Return the first of `length` ascending columns that is at least `least`, `length` if none."""
    begin, end = 0, length
    while begin < end:
        middle = (begin + end) // 2
        if columns[middle] < least:
            begin = middle + 1
        else:
            end = middle
    return begin


MIXED = 4  # Vectors of a value that are summed side by side
QUERIES = 4 if LANES == 16 else 2  # Queries whose values are summed side by side

_mix_queries, _mix_one = mix(QUERIES, MIXED), mix(1, MIXED)
_mix_vector, _mix_rest = mix(1, 1), mix(1, 1, is_partial=True)

_SINGLE = np.float32(0.0)


@jit_inner_numbers
def attend(op, piece, scratch, kind):
    """Attend with the tokens of a segment to their slots, in one head.

    A token's scores are in the order of the slots that it sees, wherever unseen slots are, so that
    its sums are the same in every block.
    """
    plan, width = longs(op[f.PLAN]), width_of(kind)
    heads, dim, stride = op[f.HEADS], op[f.SIZE], op[f.SHARED] * op[f.SIZE]
    segment = longs(plan[f.SEGMENTS] + piece // heads * f.SEGMENT_FIELDS * 8)
    head = piece % heads
    first_token, count = segment[f.FIRST], segment[f.COUNT]
    begin, common = segment[f.BEGIN], segment[f.END] - segment[f.BEGIN]
    offset = (segment[f.ROW_SLOT] * stride + head * op[f.SHARED] // heads * dim) * width
    keys, values = op[f.WEIGHT] + offset, op[f.WEIGHT_2] + offset
    queries, by_query = op[f.SOURCE] + (first_token * heads + head) * dim * width, heads * dim
    pitch = plan[f.PITCH]
    starts, tails = longs(plan[f.TAIL_STARTS]), longs(plan[f.TAILS])
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
    factor, limit = float_of(op[f.FACTOR]), float_of(op[f.EPSILON])
    for t in range(count):
        query, scores = queries + t * by_query * in_query, scratch + t * pitch * 4
        for slot in range(whole, common):
            dot(at + slot * stride * width, query, dim, scores + slot * 4, kind)
        tail = starts[first_token + t]
        length = starts[first_token + t + 1] - tail
        for i in range(length):
            to = scores + (common + i) * 4
            dot(keys + tails[tail + i] * stride * width, query, dim, to, kind)
        scale = cap_all(scores, common + length, factor, limit)
        most = largest_of(scores, common + length, _SINGLE) * scale
        weigh_all(scores, common + length, scale, most)
        total[t] = np.float32(1.0) / sum_of(scores, common + length, _SINGLE)
    first_value = values + begin * stride * width
    _mix(scratch, pitch, first_value, stride, 0, common, count, dim, out, kind)
    for t in range(count):
        tail = starts[first_token + t]
        length = starts[first_token + t + 1] - tail
        scores, to = scratch + (t * pitch + common) * 4, out + t * dim * 4
        listed = plan[f.TAILS] + tail * 8
        _mix(scores, 0, values, stride, listed, length, 1, dim, to, kind)
        for i in range(t * dim, (t + 1) * dim):
            mixed[i] *= total[t]
        target = op[f.TARGET] + ((first_token + t) * heads + head) * dim * width
        narrow_all(to, dim, target, kind)


@jit_inner_numbers
def _mix(scores, pitch, values, stride, slots, num_slots, count, dim, out, kind):
    """Add up the values of slots for `count` tokens; `slots` is as in `mix`."""
    width, place = width_of(kind), 0
    while place + MIXED * LANES <= dim:
        t, v = 0, values + place * width
        while t < count:
            p, to = scores + t * pitch * 4, out + (t * dim + place) * 4
            if count - t >= QUERIES:
                _mix_queries(p, pitch, v, stride, slots, num_slots, to, dim, 0, kind)
                t += QUERIES
            else:
                _mix_one(p, pitch, v, stride, slots, num_slots, to, dim, 0, kind)
                t += 1
        place += MIXED * LANES
    while place < dim:
        v, rest = values + place * width, dim - place
        for t in range(count):
            p, to = scores + t * pitch * 4, out + (t * dim + place) * 4
            if rest >= LANES:
                _mix_vector(p, 0, v, stride, slots, num_slots, to, 0, 0, kind)
            else:
                _mix_rest(p, 0, v, stride, slots, num_slots, to, 0, rest, kind)
        place += LANES

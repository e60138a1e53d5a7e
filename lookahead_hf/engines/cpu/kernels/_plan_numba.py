"""Plans of attention: which slots of the cache the tokens of a block see."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.engines.cpu.kernels.fields import BEGIN, COUNT, END, FIRST, ROW_SLOT
from lookahead_hf.ngram_pool.jit import jit, jit_inner


@jit
def plan_rows(
    parents,
    counts,
    lengths,
    query,
    least,
    columns,
    row_slots,
    first_token,
    most,
    segments,
    tail_starts,
    tails,
):
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
                segment[FIRST], segment[COUNT], segment[ROW_SLOT] = token, count, row_slots[row]
                segment[BEGIN], segment[END] = begin, end
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

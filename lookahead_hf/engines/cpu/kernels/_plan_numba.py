"""Plans of attention: which slots of the cache the tokens of a block see."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from lookahead_hf.engines.cpu.kernels.fields import BEGIN, COUNT, END, FIRST, ROW_SLOT
from lookahead_hf.ngram_pool.jit import jit, jit_inner


@jit
def plan_rows(seen, counts, row_slots, first_token, most, segments, tail_starts, tails):
    """Write the segments and tails of the tokens of some rows.

    A token sees one run of slots, and single slots behind it, its tail. Tokens whose runs begin at
    the same slot form a segment, which covers what all of them see of it.

    Args:
        seen: Whether a token sees a slot, [rows, width, slots] bool.
        counts: Tokens of each row, [rows]; the others are padding.
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
    for row in range(len(counts)):
        at = 0
        while at < counts[row]:
            begin = _first_seen(seen[row, at])
            last = at + 1
            while last < counts[row] and _first_seen(seen[row, last]) == begin:
                last += 1
            while at < last:
                parts = (last - at + most - 1) // most
                count = (last - at + parts - 1) // parts
                end = seen.shape[2]
                for t in range(at, at + count):
                    end = min(end, _end_of_run(seen[row, t], begin))
                segment = segments[num_segments]
                segment[FIRST], segment[COUNT], segment[ROW_SLOT] = token, count, row_slots[row]
                segment[BEGIN], segment[END] = begin, end
                num_segments += 1
                for t in range(at, at + count):
                    place = tail_starts[token]
                    for slot in range(end, seen.shape[2]):
                        if seen[row, t, slot]:
                            tails[place] = slot
                            place += 1
                    pitch = max(pitch, end - begin + place - tail_starts[token])
                    token += 1
                    tail_starts[token] = place
                at += count
    return num_segments, pitch


@jit_inner
def _first_seen(seen):
    for slot in range(len(seen)):
        if seen[slot]:
            return slot
    return len(seen)


@jit_inner
def _end_of_run(seen, begin):
    slot = begin
    while slot < len(seen) and seen[slot]:
        slot += 1
    return slot

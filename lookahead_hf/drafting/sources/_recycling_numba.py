"""Compiled growth and learning of recycling, and its buckets: by key, rank and probability."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.drafting._numba import pop, push
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.logits_memory import find

RANK_EDGES = (1, 2, 3, 5, 8)
PROB_EDGES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
NUM_PROBS = len(PROB_EDGES) + 1
SINGLE_START = (len(RANK_EDGES) + 1) * NUM_PROBS
NEXT_START = 2 * SINGLE_START
NUM_BUCKETS = 3 * SINGLE_START
"""The buckets of tokens remembered under two tokens come first.

Then come those under one (from `SINGLE_START`) and those of the last logits (from `NEXT_START`).
"""

NO_BUCKET = -1

TOKEN, PARENT, DEPTH, MEMORY_BUCKET, NEXT_BUCKET = range(5)


@jit
def grow_trees(
    keys, tokens, probs, contexts, next_tokens, next_probs, live, rates, max_nodes, cutoff
):
    """Grow a tree per live row through the memory and from the last logits' other candidates.

    `contexts` holds the last two tokens of each row, [rows, 2] int64, -1 where there is none.
    """
    num_rows, top_k = len(contexts), tokens.shape[1]
    capacity = num_rows * max_nodes
    offsets = np.zeros(num_rows + 1, np.int64)
    nodes = np.empty((5, capacity), np.int32)
    score = np.empty(capacity, np.float32)
    room = (max_nodes + 1) * top_k + next_tokens.shape[1]
    candidates = np.empty((5, room), np.int32)
    reach = np.empty(room, np.float64)
    heap = np.empty(room, np.int32)
    top = room - 1
    written = 0
    for row in range(num_rows):
        first = written
        size, count = 0, 0
        if live[row]:
            before, last = contexts[row, 0], contexts[row, 1]
            entry, base = _recall(keys, before, last)
            count = _add_remembered(
                entry, base, -1, 1, 1.0, tokens, probs, rates, candidates, reach, 0
            )
            count = _add_next(next_tokens[row], next_probs[row], rates, candidates, reach, count)
            _share(0, count, 1.0, reach)
            size = _enqueue(0, count, heap, top, 0, reach, cutoff)
        while size > 0 and written - first < max_nodes:
            best = heap[top]
            size = pop(heap, top, size, reach)
            for field in range(len(nodes)):  # numba compiles an assignment of slices for seconds
                nodes[field, written] = candidates[field, best]
            score[written] = reach[best]
            parent = candidates[PARENT, best]
            before = nodes[TOKEN, first + parent] if parent >= 0 else contexts[row, 1]
            entry, base = _recall(keys, before, candidates[TOKEN, best])
            new = _add_remembered(
                entry, base, written - first, candidates[DEPTH, best] + 1, reach[best],
                tokens, probs, rates, candidates, reach, count,
            )  # fmt: skip
            _share(count, new, reach[best], reach)
            size = _enqueue(count, new, heap, top, size, reach, cutoff)
            count = new
            written += 1
        offsets[row + 1] = written
    entry_offsets, buckets = _flatten_buckets(nodes, written)
    return (
        offsets,
        nodes[TOKEN, :written].astype(np.int64),
        nodes[PARENT, :written].copy(),
        nodes[DEPTH, :written].copy(),
        score[:written],
        entry_offsets,
        buckets,
    )


@jit_inner
def bucket_of(rank, prob):
    found = 0
    for edge in RANK_EDGES:
        found += NUM_PROBS * (rank >= edge)
    for prob_edge in PROB_EDGES:
        found += int(np.float64(prob) >= prob_edge)
    return found


@jit_inner
def _recall(keys, before, last):
    entry = find(keys, before, last)
    if entry >= 0:
        return entry, 0
    return find(keys, -1, last), SINGLE_START


@jit_inner
def _add_remembered(
    entry, base, parent, depth, above, tokens, probs, rates, candidates, reach, count
):
    """Append the tokens of a memory entry as candidates below `parent`; return the new count."""
    if entry < 0:
        return count
    for rank in range(tokens.shape[1]):
        if tokens[entry, rank] < 0:
            break
        bucket = base + bucket_of(rank, probs[entry, rank])
        candidates[TOKEN, count] = tokens[entry, rank]
        candidates[PARENT, count] = parent
        candidates[DEPTH, count] = depth
        candidates[MEMORY_BUCKET, count] = bucket
        candidates[NEXT_BUCKET, count] = NO_BUCKET
        reach[count] = above * np.float64(rates[bucket])
        count += 1
    return count


@jit_inner
def _add_next(next_tokens, next_probs, rates, candidates, reach, count):
    """Add the last logits' other candidates at the root; return the new count."""
    remembered = count
    for rank in range(len(next_tokens)):
        if next_tokens[rank] < 0:
            break
        bucket = NEXT_START + bucket_of(rank, next_probs[rank])
        at = 0
        while at < remembered and candidates[TOKEN, at] != next_tokens[rank]:
            at += 1
        rate = np.float64(rates[bucket])
        if at == remembered:
            at = count
            candidates[TOKEN, at] = next_tokens[rank]
            candidates[PARENT, at] = -1
            candidates[DEPTH, at] = 1
            candidates[MEMORY_BUCKET, at] = NO_BUCKET
            reach[at] = rate
            count += 1
        else:
            reach[at] = 1.0 - (1.0 - reach[at]) * (1.0 - rate)
        candidates[NEXT_BUCKET, at] = bucket
    return count


@jit_inner
def _share(begin, end, above, reach):
    total = 0.0
    for candidate in range(begin, end):
        total += reach[candidate]
    if total > above:
        for candidate in range(begin, end):
            reach[candidate] *= above / total


@jit_inner
def _enqueue(begin, end, heap, top, size, reach, cutoff):
    for candidate in range(begin, end):
        if reach[candidate] > cutoff:
            size = push(heap, top, size, candidate, reach)
    return size


@jit_inner
def _flatten_buckets(nodes, count):
    offsets = np.zeros(count + 1, np.int64)
    buckets = np.empty(2 * count, np.int32)
    end = 0
    for node in range(count):
        for field in (MEMORY_BUCKET, NEXT_BUCKET):
            if nodes[field, node] != NO_BUCKET:
                buckets[end] = nodes[field, node]
                end += 1
        offsets[node + 1] = end
    return offsets, buckets[:end]


@jit
def verified_contexts(
    keys, last_two, row_offsets, token_ids, parents, path_offsets, path, live, below_rejected
):
    """Return the last two tokens at verified nodes of the live rows, and where their logits are.

    The last token of a row counts as a node. The accepted path comes last and its end very last, so
    that emitted tokens overwrite those only considered. Other nodes are left out if the memory has
    their pair: its entry is as good, and searching logits is most of the drafting time of many rows
    on a CPU.

    `last_two` are the tokens of each row before the step, -1: none, [rows, 2] int64; with
    `below_rejected`, nodes with rejected parents count. Returns the tokens `before` (-1: none) and
    `last`, and the `row` and `place` of their logits, [nodes] each; and the last node of each live
    row, [live rows]. All are int64.
    """
    most = len(token_ids) + len(live)
    before, last = np.empty(most, np.int64), np.empty(most, np.int64)
    of_row, place = np.empty(most, np.int64), np.empty(most, np.int64)
    ends = np.empty(len(live), np.int64)
    is_accepted = np.zeros(most, np.bool_)
    count, num_ends = 0, 0
    for row in range(len(live)):
        if not live[row]:
            continue
        first, num_nodes = row_offsets[row], row_offsets[row + 1] - row_offsets[row]
        is_accepted[: num_nodes + 1] = False
        is_accepted[0] = True
        end = -1
        for node in path[path_offsets[row] : path_offsets[row + 1]]:
            is_accepted[1 + node] = True
            end = node
        for is_path in (False, True):
            for node in range(-1, num_nodes):
                parent = parents[first + node] if node >= 0 else -1
                counts = below_rejected or is_accepted[1 + parent]
                if is_accepted[1 + node] != is_path or not counts:
                    continue
                if node < 0:
                    before[count], last[count] = last_two[row, 0], last_two[row, 1]
                else:
                    before[count] = token_ids[first + parent] if parent >= 0 else last_two[row, 1]
                    last[count] = token_ids[first + node]
                if node == end or find(keys, before[count], last[count]) < 0:
                    of_row[count], place[count] = row, 1 + node
                    count += 1
        ends[num_ends] = count - 1
        num_ends += 1
    return before[:count], last[:count], of_row[:count], place[:count], ends[:num_ends]


@jit
def note_rejected(rows, emitted, tokens, probs, next_tokens, next_probs):
    """Write what the target considered besides the `emitted` tokens of `rows`, [noted] each.

    `tokens` and `probs`, [noted, any], are its best ones there, best first, -1: none.
    `next_tokens` and `next_probs`, [rows, most], hold the same for all rows.
    """
    for noted in range(len(rows)):
        row, count = rows[noted], 0
        next_tokens[row] = -1
        for rank in range(tokens.shape[1]):
            token = tokens[noted, rank]
            if count < next_tokens.shape[1] and token >= 0 and token != emitted[noted]:
                next_tokens[row, count] = token
                next_probs[row, count] = probs[noted, rank]
                count += 1

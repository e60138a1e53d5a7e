"""Loops of drafting, compiled: a heap, merging, learned rates."""

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool.jit import jit, jit_inner

# mypy: disable-error-code="no-untyped-def"


@jit_inner
def before(a, b, reach):
    """Return whether node `a` leaves the queue before node `b`."""
    return reach[a] > reach[b] or (reach[a] == reach[b] and a < b)


@jit_inner
def push(heap, top, size, node, reach):
    """Add a node; returns the new size."""
    hole = size
    while hole > 0 and before(node, heap[top - (hole - 1) // 2], reach):
        heap[top - hole] = heap[top - (hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[top - hole] = node
    return size + 1


@jit_inner
def pop(heap, top, size, reach):
    """Remove the node at `heap[top]`, which the caller has read; returns the new size."""
    size -= 1
    node = heap[top - size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and before(heap[top - child - 1], heap[top - child], reach):
            child += 1
        if before(node, heap[top - child], reach):
            break
        heap[top - hole] = heap[top - child]
        hole = child
    if size > 0:
        heap[top - hole] = node
    return size


# Rows of the scratch arrays.
PARENT, DEPTH, FIRST_ENTRY, LAST_ENTRY, FIRST_CHILD, NEXT_SIBLING, PLACE = range(7)
ENTRY_SOURCE, ENTRY_BUCKET, NEXT_ENTRY = range(3)

FIRST = 2.0  # What lifts a node above all that are reached with a probability


@jit
def merge_trees(
    row_offsets, token_ids, parents, entry_offsets, buckets, rates, bucket_starts, max_depth,
    vocab_size, max_nodes, drawing,
):  # fmt: skip
    """Unite the sources' trees by prefix and keep each row's `max_nodes` likeliest nodes.

    A node that several sources propose is wrong only if all of them are: `p = 1 - prod(1 - rate)`.
    Siblings exclude each other, so chances that sum to more than 1 are scaled to 1. Nodes come out
    likeliest first, so parents come first; ties keep the order of the proposals. Token ids outside
    the vocabulary are left out with all nodes below them.

    Args:
        row_offsets: Offsets of each source's rows, [sources, rows + 1] int64.
        token_ids, parents: All sources' nodes, [nodes]; parents count within the source's row.
        entry_offsets, buckets: The buckets of each node, [nodes + 1] int64 and [entries] int32.
        rates, bucket_starts: Acceptance rates, [buckets] float32; each source's first one.
        max_depth: Deepest node of each row, [rows] int64.
        drawing: The source whose path of first children comes before all other nodes, or -1.

    Returns:
        The fields of a `DraftTree` and of its evidence, and the number of each node on that path in
        its source's tree, -1 for all other nodes.
    """
    num_rows = row_offsets.shape[1] - 1
    capacity = min(len(token_ids), num_rows * max_nodes)
    offsets = np.zeros(num_rows + 1, np.int64)
    out_tokens = np.empty(capacity, np.int64)
    out_fields = np.empty((2, capacity), np.int32)
    out_score = np.empty(capacity, np.float32)
    out_drawn = np.empty(capacity, np.int64)
    out_offsets = np.zeros(capacity + 1, np.int64)
    out_entries = np.empty((2, len(buckets)), np.int32)

    room, most_entries = _largest_row(row_offsets, entry_offsets)
    table = np.empty(_table_size(room), np.int32)
    nodes = np.empty((7, room), np.int32)
    entries = np.empty((3, most_entries), np.int32)
    united, heap = np.empty(room, np.int32), np.empty(room, np.int32)
    tokens, origin = np.empty(room, np.int64), np.empty(room, np.int64)
    drawn = np.zeros(room, np.bool_)
    reach, total = np.empty(room, np.float64), np.empty(room + 1, np.float64)

    for row in range(num_rows):
        count = _unite(
            row, row_offsets, token_ids, parents, entry_offsets, buckets, max_depth[row],
            vocab_size, table, nodes, entries, united, origin, tokens, drawing,
        )  # fmt: skip
        _reach(count, nodes, entries, rates, bucket_starts, reach, total)
        if drawing >= 0:
            last = row_offsets[drawing, row + 1]
            _put_first(count, nodes, origin, row_offsets[drawing, row], last, drawn, reach)
        kept = _take_likeliest(count, nodes, reach, heap, max_nodes)
        written = offsets[row]
        for node in heap[:kept]:
            above = nodes[PARENT, node]
            out_tokens[written] = tokens[node]
            out_fields[0, written] = nodes[PLACE, above] if above >= 0 else -1
            out_fields[1, written] = nodes[DEPTH, node]
            out_score[written] = reach[node] - FIRST if drawn[node] else reach[node]
            out_drawn[written] = origin[node] - row_offsets[drawing, 0] if drawn[node] else -1
            out_offsets[written + 1] = _copy_entries(
                nodes[FIRST_ENTRY, node], entries, out_offsets[written], out_entries
            )
            written += 1
        offsets[row + 1] = written
    end = offsets[num_rows]
    last = out_offsets[end]
    return (
        offsets, out_tokens[:end], out_fields[0, :end], out_fields[1, :end], out_score[:end],
        out_offsets[: end + 1], out_entries[0, :last], out_entries[1, :last], out_drawn[:end],
    )  # fmt: skip


@jit_inner
def _table_size(num_nodes):
    """Return a power of two that leaves at least half of a hash table free."""
    size = 16
    while size < 2 * num_nodes:
        size *= 2
    return size


@jit_inner
def _copy_entries(entry, entries, end, out_entries):
    while entry >= 0:
        out_entries[0, end] = entries[ENTRY_SOURCE, entry]
        out_entries[1, end] = entries[ENTRY_BUCKET, entry]
        end += 1
        entry = entries[NEXT_ENTRY, entry]
    return end


@jit_inner
def _largest_row(row_offsets, entry_offsets):
    most_nodes, most_entries = 1, 1
    for row in range(row_offsets.shape[1] - 1):
        nodes, entries = 0, 0
        for source in range(row_offsets.shape[0]):
            first, last = row_offsets[source, row], row_offsets[source, row + 1]
            nodes += last - first
            entries += entry_offsets[last] - entry_offsets[first]
        most_nodes, most_entries = max(most_nodes, nodes), max(most_entries, entries)
    return most_nodes, most_entries


@jit_inner
def _unite(
    row, row_offsets, token_ids, parents, entry_offsets, buckets, max_depth, vocab_size, table,
    nodes, entries, united, origin, tokens, drawing,
):  # fmt: skip
    """Unite one row by prefix through a hash table of (parent, token); return the node count.

    The nodes of the source `drawing` come first, those of the others in their order.
    """
    count, num_entries = 0, 0
    mask = len(table) - 1
    table[:] = -1
    for turn in range(row_offsets.shape[0]):
        source = turn if turn > drawing else (turn - 1) % (drawing + 1)
        first = row_offsets[source, row]
        for node in range(first, row_offsets[source, row + 1]):
            local = node - first
            united[local] = -2
            token, parent = token_ids[node], parents[node]
            if token < 0 or token >= vocab_size:
                continue
            at = united[parent] if parent >= 0 else -1
            depth = nodes[DEPTH, at] + 1 if at >= 0 else 1
            if at == -2 or depth > max_depth:
                continue
            slot = ((token * 0x9E3779B1 + at * 0x85EBCA6B) >> 7) & mask
            while table[slot] >= 0:
                known = table[slot]
                if tokens[known] == token and nodes[PARENT, known] == at:
                    break
                slot = (slot + 1) & mask
            if table[slot] < 0:
                table[slot] = count
                tokens[count] = token
                origin[count] = node
                nodes[PARENT, count] = at
                nodes[DEPTH, count] = depth
                nodes[FIRST_ENTRY, count] = -1
                count += 1
            merged = table[slot]
            united[local] = merged
            for entry in range(entry_offsets[node], entry_offsets[node + 1]):
                num_entries = _add_entry(
                    merged, source, buckets[entry], nodes, entries, num_entries
                )
    return count


@jit_inner
def _add_entry(node, source, bucket, nodes, entries, num_entries):
    """Append (source, bucket) to a node's list unless it is there; return the number of entries."""
    entry = nodes[FIRST_ENTRY, node]
    while entry >= 0:
        if entries[ENTRY_SOURCE, entry] == source and entries[ENTRY_BUCKET, entry] == bucket:
            return num_entries
        entry = entries[NEXT_ENTRY, entry]
    entries[ENTRY_SOURCE, num_entries] = source
    entries[ENTRY_BUCKET, num_entries] = bucket
    entries[NEXT_ENTRY, num_entries] = -1
    if nodes[FIRST_ENTRY, node] < 0:
        nodes[FIRST_ENTRY, node] = num_entries
    else:
        entries[NEXT_ENTRY, nodes[LAST_ENTRY, node]] = num_entries
    nodes[LAST_ENTRY, node] = num_entries
    return num_entries + 1


@jit_inner
def _reach(count, nodes, entries, rates, bucket_starts, reach, total):
    """Fill `reach` with path probabilities; `total` holds the siblings' sums, the root's last."""
    root = len(total) - 1
    total[:count] = 0.0
    total[root] = 0.0
    for node in range(count):
        miss = 1.0
        entry = nodes[FIRST_ENTRY, node]
        while entry >= 0:
            first = bucket_starts[entries[ENTRY_SOURCE, entry]]
            miss *= 1.0 - np.float64(rates[first + entries[ENTRY_BUCKET, entry]])
            entry = entries[NEXT_ENTRY, entry]
        parent = nodes[PARENT, node]
        reach[node] = 1.0 - miss
        total[parent if parent >= 0 else root] += 1.0 - miss
    for node in range(count):
        parent = nodes[PARENT, node]
        above = reach[parent] if parent >= 0 else 1.0
        reach[node] = above * reach[node] / max(total[parent if parent >= 0 else root], 1.0)


@jit_inner
def _put_first(count, nodes, origin, first, last, drawn, reach):
    """Lift the path of first children of the nodes `first` to `last` above all other nodes."""
    at = -1
    for node in range(count):
        drawn[node] = nodes[PARENT, node] == at and first <= origin[node] < last
        if drawn[node]:
            reach[node] += FIRST
            at = node


@jit_inner
def _take_likeliest(count, nodes, reach, heap, max_nodes):
    """Put the best nodes into `heap[:kept]`, likeliest first, and their indices into PLACE."""
    roots = _link_children(nodes[PARENT, :count], nodes[FIRST_CHILD], nodes[NEXT_SIBLING])
    top = len(heap) - 1
    size = _push_siblings(heap, top, 0, roots, nodes, reach)
    kept = 0
    while size > 0 and kept < max_nodes:
        node = heap[top]
        size = pop(heap, top, size, reach)
        nodes[PLACE, node] = kept
        heap[kept] = node
        kept += 1
        size = _push_siblings(heap, top, size, nodes[FIRST_CHILD, node], nodes, reach)
    return kept


@jit_inner
def _link_children(parents, first_child, next_sibling):
    roots = -1
    first_child[: len(parents)] = -1
    for node in range(len(parents) - 1, -1, -1):
        parent = parents[node]
        if parent >= 0:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
        else:
            next_sibling[node] = roots
            roots = node
    return roots


@jit_inner
def _push_siblings(heap, top, size, node, nodes, reach):
    while node >= 0:
        size = push(heap, top, size, node, reach)
        node = nodes[NEXT_SIBLING, node]
    return size


@jit
def head_order(row_offsets, parents, counts):
    """Put each row's first `counts[row]` nodes in depth-first order, the first child first.

    Returns new row offsets, the old flat index of each kept node, and its new parent, [kept] int32.
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    for row in range(len(counts)):
        offsets[row + 1] = offsets[row] + counts[row]
    order, moved_parents = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int32)
    size = np.ones(len(parents), np.int64)  # nodes from this one on down
    place, free = np.empty(len(parents), np.int64), np.empty(len(parents), np.int64)
    for row in range(len(counts)):
        first, unused = row_offsets[row], 0
        for node in range(first + counts[row] - 1, first - 1, -1):
            if parents[node] >= 0:
                size[first + parents[node]] += size[node]
        for node in range(first, first + counts[row]):
            above = first + parents[node]
            if parents[node] >= 0:
                place[node] = free[above]
                free[above] += size[node]
            else:
                place[node] = unused
                unused += size[node]
            free[node] = place[node] + 1
            order[offsets[row] + place[node]] = node
            moved_parents[offsets[row] + place[node]] = place[above] if parents[node] >= 0 else -1
    return offsets, order, moved_parents


@jit
def tested_nodes(row_offsets, token_ids, parents, token_offsets, emitted):
    """Return what the text says about each node, [nodes] int8: 1 right, 0 wrong, -1 untested.

    Children of the root and of right nodes are tested by the token after their parent.
    """
    outcome = np.full(len(token_ids), -1, np.int8)
    after = np.full(len(token_ids), -1, np.int64)
    for row in range(len(row_offsets) - 1):
        first = row_offsets[row]
        start, end = token_offsets[row], token_offsets[row + 1]
        for node in range(first, row_offsets[row + 1]):
            parent = parents[node]
            place = after[first + parent] if parent >= 0 else 0
            if place < 0 or start + place >= end:
                continue
            outcome[node] = token_ids[node] == emitted[start + place]
            if outcome[node]:
                after[node] = place + 1
    return outcome


@jit
def learn_rates(
    outcome, entry_offsets, entry_source, entry_bucket, bucket_starts, prior, prior_weight, memory,
    counts, gained, rates,
):  # fmt: skip
    """Count each tested node in all its buckets and update their rates.

    After `memory` tests, a bucket forgets as much as it learns, and so follows the text. The
    `counts`, `gained` and `rates` of a `Calibration` change in place.
    """
    for node in range(len(outcome)):
        if outcome[node] < 0:
            continue
        for entry in range(entry_offsets[node], entry_offsets[node + 1]):
            bucket = bucket_starts[entry_source[entry]] + entry_bucket[entry]
            if counts[1, bucket] >= memory:
                keep = (memory - 1.0) / counts[1, bucket]
                counts[0, bucket] *= keep
                counts[1, bucket] *= keep
            for total in (counts, gained):
                total[0, bucket] += outcome[node]
                total[1, bucket] += 1.0
            weight = counts[1, bucket] + prior_weight
            rates[bucket] = (counts[0, bucket] + prior_weight * prior[bucket]) / weight


@jit
def count_sources(row_offsets, entry_offsets, entry_source, path_offsets, path, counts):
    """Add up what each source drafted, what was accepted, and what of that only it proposed.

    `counts`, [rows, 3, sources] int64, changes in place. Returns the third count of this step over
    all rows, [sources] int64.
    """
    num_sources = counts.shape[2]
    proposed = np.empty(num_sources, np.bool_)
    exclusive = np.zeros(num_sources, np.int64)
    for row in range(len(row_offsets) - 1):
        first = row_offsets[row]
        accepted = path[path_offsets[row] : path_offsets[row + 1]]
        for node in range(first, row_offsets[row + 1]):
            hit = False
            for place in accepted:
                hit |= place == node - first
            proposed[:] = False
            num_proposing = 0
            for entry in range(entry_offsets[node], entry_offsets[node + 1]):
                num_proposing += not proposed[entry_source[entry]]
                proposed[entry_source[entry]] = True
            is_alone = num_proposing == 1
            for source in range(num_sources):
                counts[row, 0, source] += proposed[source]
                counts[row, 1, source] += hit and proposed[source]
                counts[row, 2, source] += hit and proposed[source] and is_alone
                exclusive[source] += hit and proposed[source] and is_alone
    return exclusive

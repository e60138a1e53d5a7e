"""The compiled functions on draft trees and verdicts, in Python for reading."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np


@dataclass
class _Node:
    """A node of one row; `origin` is the flat node that proposed it first."""

    token: int
    parent: int
    depth: int
    origin: int
    entries: list[tuple[int, int]] = field(default_factory=list)  # source and bucket
    reach: float = 1.0
    drawn: bool = False


def merge_trees(
    row_offsets, token_ids, parents, entry_offsets, buckets, rates, bucket_starts, max_depth,
    vocab_size, max_nodes, drawing,
):  # fmt: skip
    rows = []
    for row in range(row_offsets.shape[1] - 1):
        nodes: list[_Node] = []
        known: dict[tuple[int, int], int] = {}
        end = -1  # of what was drawn
        for source in sorted(range(len(row_offsets)), key=lambda source: source != drawing):
            first = int(row_offsets[source, row])
            united = {-1: -1}
            for node in range(first, int(row_offsets[source, row + 1])):
                token, parent = int(token_ids[node]), int(parents[node])
                own = buckets[entry_offsets[node] : entry_offsets[node + 1]].tolist()
                if parent not in united or not 0 <= token < vocab_size:
                    continue
                at = united[parent]
                depth = 1 if at < 0 else nodes[at].depth + 1
                if depth > max_depth[row]:
                    continue
                if (at, token) not in known:
                    known[at, token] = len(nodes)
                    is_drawn = source == drawing and at == end
                    end = len(nodes) if is_drawn else end
                    nodes.append(_Node(token, at, depth, node, drawn=is_drawn))
                united[node - first] = known[at, token]
                found = nodes[known[at, token]].entries
                found.extend((source, b) for b in own if (source, b) not in found)
        _fill_reach(nodes, rates, bucket_starts)
        order = _likeliest(nodes, max_nodes)
        place = {node: index for index, node in enumerate(order)}
        for each in nodes:
            each.parent = place.get(each.parent, -1)
        rows.append([nodes[node] for node in order])
    kept = [node for of_row in rows for node in of_row]
    entries = [entry for node in kept for entry in node.entries]
    return (
        np.cumsum([0, *map(len, rows)]),
        np.array([node.token for node in kept], np.int64),
        np.array([node.parent for node in kept], np.int32),
        np.array([node.depth for node in kept], np.int32),
        np.array([node.reach for node in kept], np.float32),
        np.cumsum([0] + [len(node.entries) for node in kept]),
        np.array([source for source, _ in entries], np.int32),
        np.array([bucket for _, bucket in entries], np.int32),
        np.array([node.origin - row_offsets[drawing, 0] if node.drawn else -1 for node in kept]),
    )


def _fill_reach(nodes: list[_Node], rates: np.ndarray, bucket_starts: np.ndarray) -> None:
    total: defaultdict[int, float] = defaultdict(float)
    for node in nodes:
        misses = (1.0 - float(rates[bucket_starts[source] + b]) for source, b in node.entries)
        node.reach = 1.0 - np.multiply.reduce([1.0, *misses])
        total[node.parent] += node.reach
    for node in nodes:
        above = 1.0 if node.parent < 0 else nodes[node.parent].reach
        node.reach = above * node.reach / max(total[node.parent], 1.0)


def _likeliest(nodes: list[_Node], max_nodes: int) -> list[int]:
    def rank(index: int) -> tuple[bool, float, int]:
        return not nodes[index].drawn, -nodes[index].reach, index

    heap = [rank(index) for index, node in enumerate(nodes) if node.parent < 0]
    heapq.heapify(heap)
    order: list[int] = []
    while heap and len(order) < max_nodes:
        order.append(heapq.heappop(heap)[-1])
        for child, node in enumerate(nodes):
            if node.parent == order[-1]:
                heapq.heappush(heap, rank(child))
    return order


def head_order(row_offsets, parents, counts):
    offsets, order, moved_parents = [0], list[int](), list[int]()
    for first, count in zip(row_offsets[:-1].tolist(), counts.tolist(), strict=True):
        kept = parents[first : first + count].tolist()
        place = {-1: -1}
        stack = [node for node, parent in enumerate(kept) if parent == -1][::-1]
        while stack:
            node = stack.pop()
            place[node] = len(place) - 1
            order.append(first + node)
            moved_parents.append(place[kept[node]])
            stack += [child for child, parent in enumerate(kept) if parent == node][::-1]
        offsets.append(len(order))
    return np.array(offsets), np.array(order, np.int64), np.array(moved_parents, np.int32)


def tested_nodes(row_offsets, token_ids, parents, token_offsets, emitted):
    outcome = np.full(len(token_ids), -1, np.int8)
    for row in range(len(row_offsets) - 1):
        first = int(row_offsets[row])
        truth = emitted[token_offsets[row] : token_offsets[row + 1]].tolist()
        after = {-1: 0}
        for node in range(first, int(row_offsets[row + 1])):
            place = after.get(int(parents[node]), len(truth))
            if place < len(truth):
                outcome[node] = int(token_ids[node]) == truth[place]
                if outcome[node]:
                    after[node - first] = place + 1
    return outcome


def learn_rates(
    outcome, entry_offsets, entry_source, entry_bucket, bucket_starts, prior, prior_weight, memory,
    counts, gained, rates,
):  # fmt: skip
    for node in np.flatnonzero(outcome >= 0):
        for entry in range(int(entry_offsets[node]), int(entry_offsets[node + 1])):
            bucket = int(bucket_starts[entry_source[entry]]) + int(entry_bucket[entry])
            if counts[1, bucket] >= memory:
                counts[:, bucket] *= (memory - 1.0) / counts[1, bucket]
            for total in (counts, gained):
                total[:, bucket] += outcome[node], 1.0
            weight = counts[1, bucket] + prior_weight
            rates[bucket] = (counts[0, bucket] + prior_weight * prior[bucket]) / weight


def count_sources(row_offsets, entry_offsets, entry_source, path_offsets, path, counts):
    before = counts[:, 2].sum(0)
    for row in range(len(row_offsets) - 1):
        first = int(row_offsets[row])
        accepted = set(path[path_offsets[row] : path_offsets[row + 1]].tolist())
        for node in range(first, int(row_offsets[row + 1])):
            sources = set(entry_source[entry_offsets[node] : entry_offsets[node + 1]].tolist())
            hit = node - first in accepted
            for source in sources:
                counts[row, :, source] += 1, hit, hit and len(sources) == 1
    return counts[:, 2].sum(0) - before

"""Plain twins of the compiled drafting functions: fallback, test oracle and documentation."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

MergedTree = tuple[np.ndarray, ...]
"""row_offsets, token_ids, parents, depth, score, entry offsets, sources and buckets, origin."""


def merge_trees(
    row_offsets: np.ndarray,  # [sources, rows + 1] int64
    token_ids: np.ndarray,  # [nodes] int64
    parents: np.ndarray,  # [nodes] int32, within the source's row
    entry_offsets: np.ndarray,  # [nodes + 1] int64
    buckets: np.ndarray,  # [entries] int32, within the source
    rates: np.ndarray,  # [buckets] float32, source after source
    bucket_starts: np.ndarray,  # [sources + 1] int64
    max_depth: np.ndarray,  # [rows] int64
    vocab_size: int,
    max_nodes: int,
) -> MergedTree:
    """Unite the sources' trees by prefix and keep each row's `max_nodes` likeliest nodes.

    A node that several sources propose is wrong only where all of them are:
    `p = 1 - prod(1 - rate)`. Siblings exclude each other: where their sum exceeds 1 they share it.
    Nodes come out likeliest first, hence parents first; equal ones in the order of the proposals.
    Token ids outside the vocabulary, unknown parents or buckets and their children are left out.
    """
    rows = []
    for row in range(row_offsets.shape[1] - 1):
        nodes = _unite(
            row, row_offsets, token_ids, parents, entry_offsets, buckets, bucket_starts,
            int(max_depth[row]), vocab_size,
        )  # fmt: skip
        _fill_reach(nodes, rates, bucket_starts)
        order = _likeliest(nodes, max_nodes)
        place = {node: index for index, node in enumerate(order)}
        for node in nodes:
            node.parent = place.get(node.parent, -1)
        rows.append([nodes[node] for node in order])
    return _flatten(rows)


@dataclass
class _Node:
    """A node of one row; `origin` is the flat node that proposed it first."""

    token: int
    parent: int
    depth: int
    origin: int
    entries: list[tuple[int, int]] = field(default_factory=list)  # source and bucket
    reach: float = 1.0


def _unite(
    row: int,
    row_offsets: np.ndarray,
    token_ids: np.ndarray,
    parents: np.ndarray,
    entry_offsets: np.ndarray,
    buckets: np.ndarray,
    bucket_starts: np.ndarray,
    max_depth: int,
    vocab_size: int,
) -> list[_Node]:
    """Prefix union of one row."""
    nodes: list[_Node] = []
    known: dict[tuple[int, int], int] = {}
    for source in range(len(row_offsets)):
        first = int(row_offsets[source, row])
        num_buckets = int(bucket_starts[source + 1] - bucket_starts[source])
        united: dict[int, int] = {-1: -1}
        for node in range(first, int(row_offsets[source, row + 1])):
            token, parent = int(token_ids[node]), int(parents[node])
            own = buckets[entry_offsets[node] : entry_offsets[node + 1]].tolist()
            own = [b for b in own if 0 <= b < num_buckets]
            if parent not in united or not own or not 0 <= token < vocab_size:
                continue
            at = united[parent]
            depth = 1 if at < 0 else nodes[at].depth + 1
            if depth > max_depth:
                continue
            if (at, token) not in known:
                known[at, token] = len(nodes)
                nodes.append(_Node(token, at, depth, node))
            united[node - first] = known[at, token]
            found = nodes[known[at, token]].entries
            found.extend((source, b) for b in own if (source, b) not in found)
    return nodes


def _fill_reach(nodes: list[_Node], rates: np.ndarray, bucket_starts: np.ndarray) -> None:
    """Fill in the probability of each node's whole path, from the learned rates of its entries."""
    total: defaultdict[int, float] = defaultdict(float)
    for node in nodes:
        miss = 1.0
        for source, bucket in node.entries:
            miss *= 1.0 - float(rates[bucket_starts[source] + bucket])
        node.reach = 1.0 - miss
        total[node.parent] += 1.0 - miss
    for node in nodes:
        above = 1.0 if node.parent < 0 else nodes[node.parent].reach
        node.reach = above * node.reach / max(total[node.parent], 1.0)


def _likeliest(nodes: list[_Node], max_nodes: int) -> list[int]:
    """The `max_nodes` nodes of greatest reach, in that order, every parent before its children."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        children[node.parent].append(index)
    heap = [(-nodes[index].reach, index) for index in children[-1]]
    heapq.heapify(heap)
    order: list[int] = []
    while heap and len(order) < max_nodes:
        _, index = heapq.heappop(heap)
        order.append(index)
        for child in children[index]:
            heapq.heappush(heap, (-nodes[child].reach, child))
    return order


def _flatten(rows: list[list[_Node]]) -> MergedTree:
    nodes = [node for row in rows for node in row]
    entries = [entry for node in nodes for entry in node.entries]
    return (
        np.cumsum([0] + [len(row) for row in rows]).astype(np.int64),
        np.array([node.token for node in nodes], np.int64),
        np.array([node.parent for node in nodes], np.int32),
        np.array([node.depth for node in nodes], np.int32),
        np.array([node.reach for node in nodes], np.float32),
        np.cumsum([0] + [len(node.entries) for node in nodes]).astype(np.int64),
        np.array([source for source, _ in entries], np.int32),
        np.array([bucket for _, bucket in entries], np.int32),
        np.array([node.origin for node in nodes], np.int64),
    )


def head_order(
    row_offsets: np.ndarray,  # [rows + 1] int64
    parents: np.ndarray,  # [nodes] int32
    num_nodes: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's first `num_nodes` nodes in depth-first order, the first child first.

    Returns:
        row_offsets: Where the rows lie after the cut, [rows + 1] int64.
        order: Old flat index of each kept node, [kept] int64.
        parents: Parents after the reordering, [kept] int32.
    """
    offsets, order, moved_parents = [0], [], []
    for row in range(len(row_offsets) - 1):
        first = int(row_offsets[row])
        last = min(int(row_offsets[row + 1]), first + num_nodes)
        children = defaultdict(list)
        for node in range(first, last):
            children[int(parents[node])].append(node - first)
        place: dict[int, int] = {-1: -1}
        stack = children[-1][::-1]
        while stack:
            node = stack.pop()
            place[node] = len(place) - 1
            order.append(first + node)
            moved_parents.append(place[int(parents[first + node])])
            stack.extend(children[node][::-1])
        offsets.append(len(order))
    return (
        np.array(offsets, np.int64),
        np.array(order, np.int64),
        np.array(moved_parents, np.int32),
    )


def tested_nodes(
    row_offsets: np.ndarray,  # [rows + 1] int64
    token_ids: np.ndarray,  # [nodes] int64
    parents: np.ndarray,  # [nodes] int32, within the row
    token_offsets: np.ndarray,  # [rows + 1] int64
    emitted: np.ndarray,  # [emitted] int64
) -> np.ndarray:
    """What the text said about each node, [nodes] int8: 1 right, 0 wrong, -1 not tested.

    Tested are the children of the root and of every node that was right, verified or not: the token
    emitted after their parent says which of them is. The others hang on what was not emitted.
    """
    outcome = np.full(len(token_ids), -1, np.int8)
    for row in range(len(row_offsets) - 1):
        first = int(row_offsets[row])
        truth = emitted[token_offsets[row] : token_offsets[row + 1]].tolist()
        after = {-1: 0}
        for node in range(int(row_offsets[row + 1]) - first):
            step = after.get(int(parents[first + node]), len(truth))
            if step < len(truth):
                outcome[first + node] = int(token_ids[first + node]) == truth[step]
                if outcome[first + node]:
                    after[node] = step + 1
    return outcome


def learn_rates(
    outcome: np.ndarray,  # [nodes] int8
    entry_offsets: np.ndarray,  # [nodes + 1] int64
    entry_source: np.ndarray,  # [entries] int32
    entry_bucket: np.ndarray,  # [entries] int32
    bucket_starts: np.ndarray,  # [sources + 1] int64
    prior: np.ndarray,  # [buckets] float32
    prior_weight: float,
    memory: float,
    counts: np.ndarray,  # [2, buckets] float64: accepted, tested, changed in place
    gained: np.ndarray,  # [2, buckets] float64: the same without forgetting, changed in place
    rates: np.ndarray,  # [buckets] float32, changed in place
) -> None:
    """Count each tested node in all its buckets and renew their rates.

    A bucket that was tested `memory` times forgets as much as it learns, so it follows the text.
    """
    for node in np.flatnonzero(outcome >= 0):
        for entry in range(int(entry_offsets[node]), int(entry_offsets[node + 1])):
            bucket = int(bucket_starts[entry_source[entry]]) + int(entry_bucket[entry])
            if counts[1, bucket] >= memory:
                counts[:, bucket] *= (memory - 1.0) / counts[1, bucket]
            for total in (counts, gained):
                total[0, bucket] += outcome[node]
                total[1, bucket] += 1.0
            weight = counts[1, bucket] + prior_weight
            rates[bucket] = (counts[0, bucket] + prior_weight * prior[bucket]) / weight


def count_sources(
    row_offsets: np.ndarray,  # [rows + 1] int64
    entry_offsets: np.ndarray,  # [nodes + 1] int64
    entry_source: np.ndarray,  # [entries] int32
    path_offsets: np.ndarray,  # [rows + 1] int64
    path: np.ndarray,  # [accepted] int32
    counts: np.ndarray,  # [3, sources] int64: drafted, accepted, exclusive; changed in place
) -> None:
    """Add up what each source drafted, what was accepted, and what of that only it proposed."""
    for row in range(len(row_offsets) - 1):
        first = int(row_offsets[row])
        accepted = set(path[path_offsets[row] : path_offsets[row + 1]].tolist())
        for node in range(first, int(row_offsets[row + 1])):
            sources = set(entry_source[entry_offsets[node] : entry_offsets[node + 1]].tolist())
            for source in sources:
                counts[0, source] += 1
                if node - first in accepted:
                    counts[1, source] += 1
                    counts[2, source] += len(sources) == 1

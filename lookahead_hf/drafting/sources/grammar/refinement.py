"""Prunes the draft of a row by a grammar, and grows what it says to follow below every node."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree
from lookahead_hf.drafting.sources.grammar.growth import Growth
from lookahead_hf.drafting.sources.grammar.probe import Probe
from lookahead_hf.drafting.sources.grammar.vocabulary import Vocabulary
from lookahead_hf.drafting.sources.grammar.whitespace import Whitespace

LIKELY = 0.02
"""Least probability of a path below which something is grown."""

OPERATIONS = 24
"""Operations of the grammar per node of the draft after which nothing more is grown. Each takes 1
to 5 us, so the refinement takes far less time than a forward."""

Entry = tuple[int, int]
"""A source and a bucket."""


class Refinement:
    """The nodes of one row while they are pruned and grown."""

    def __init__(self, tree: DraftTree, row: int, source: int, rates: np.ndarray) -> None:
        """Begin with the nodes of a row; the drafter is number `source`, with `rates` by bucket."""
        nodes, evidence = tree.row(row), tree.evidence
        assert evidence is not None
        self._source, self._rates = source, rates.tolist()
        self.tokens: list[int] = tree.token_ids[nodes].tolist()
        self.parents: list[int] = tree.parents[nodes].tolist()
        paths = np.append(tree.score[nodes], 1.0)  # the last one is the root's
        chances = paths[:-1] / paths[tree.parents[nodes]].clip(min=1e-9)
        self._chances: list[float] = chances.tolist()
        offsets = evidence.offsets[nodes.start : nodes.stop + 1]
        own = slice(offsets[0], offsets[-1])
        of_row = evidence.source[own].tolist(), evidence.bucket[own].tolist()
        entries = list(zip(*of_row, strict=True))
        places = pairwise((offsets - offsets[0]).tolist())
        self.entries: list[list[Entry]] = [entries[a:b] for a, b in places]
        self._given = len(self.tokens)
        self._children: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            self._children.setdefault(parent, {})[token] = node

    def add(self, parent: int, token: int, bucket: int) -> int:
        """Add a node of the grammar, or count both sources if another one proposes the same."""
        rate, known = self._rates[bucket], self._children.setdefault(parent, {})
        entry = self._source, bucket
        if (node := known.get(token)) is not None:
            if entry not in self.entries[node]:
                self._chances[node] = 1 - (1 - min(self._chances[node], 1.0)) * (1 - rate)
                self.entries[node].append(entry)
            return node
        known[token] = node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._chances.append(rate)
        self.entries.append([entry])
        return node

    def run(
        self, probe: Probe, whitespace: Whitespace, vocabulary: Vocabulary | None, max_nodes: int
    ) -> None:
        """Prune and grow; the probe stands after the last token, and does so again afterwards."""
        growth = Growth(probe, whitespace, vocabulary, self.add)
        texts: Sequence[bytes] = () if vocabulary is None else vocabulary.texts
        most = OPERATIONS * max_nodes

        def visit(node: int, text: bytes, chance: float) -> None:
            if chance > LIKELY and probe.operations < most:
                growth.below(node, text)
            for token, child in list(self._children.get(node, {}).items()):
                if child >= self._given:
                    continue  # it was checked when it grew
                if probe.advance(token):
                    longer = text + texts[token] if texts else b""
                    visit(child, longer, chance * min(self._chances[child], 1.0))
                    probe.back(1)
                else:
                    del self._children[node][token]

        visit(ROOT, b"", 1.0)

    def best(self, max_nodes: int, max_depth: int) -> tuple[list[int], list[int], list[float]]:
        """Return the likeliest nodes, parents first, with their parents and path chances."""
        order, parents, chances = list[int](), list[int](), list[float]()
        queue = [(-1.0, ROOT, ROOT, 0)]
        while queue and len(order) <= max_nodes:
            path, node, place, depth = heapq.heappop(queue)
            if node != ROOT:
                order.append(node)
                parents.append(place)
                chances.append(-path)
                place = len(order) - 1
            if depth < max_depth:
                for child in self._children.get(node, {}).values():
                    chance = path * min(self._chances[child], 1.0)
                    heapq.heappush(queue, (chance, child, place, depth + 1))
        return order[:max_nodes], parents[:max_nodes], chances[:max_nodes]

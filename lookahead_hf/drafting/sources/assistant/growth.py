"""One row's draft while an assistant writes it, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lookahead_hf.draft import ROOT, DraftTree
from lookahead_hf.drafting.sources.assistant.picks import TENTHS, Picked

_CLASS_OF_DEPTH = (0, 1, 2, 2)
DEPTH_CLASSES = 4
"""Depths 1, 2, 3 to 4, and beyond."""

Branches = tuple[list[int], list[int]]
"""Token ids and parents of nodes."""


class Growth:
    """Nodes of one row, parents before children, and where it goes on from.

    Attributes:
        tokens: Token of each node.
        parents: Parent of each node.
        buckets: Evidence of each node: its depth and how likely the assistant found it.
        reach: Learned probability that the path down to each node is accepted.
        drawn_from: What each node was drawn from, [vocab]; empty where nothing is drawn.
        frontier: Nodes to go on from, each with the place of its logits in the latest block.
    """

    def __init__(self, chain: Sequence[int]) -> None:
        """`chain`: what is fed first; a row without it gets no draft."""
        self._last = list(chain[-1:])
        self._depths: list[int] = []
        self._fed: list[int] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.buckets: list[int] = []
        self.reach: list[float] = []
        self.drawn_from: list[torch.Tensor] = []
        self.frontier = [(ROOT, len(chain) - 1)] if chain else []

    def extend(self, picked: Picked, rates: np.ndarray, beam: int, min_reach: float) -> None:
        """Hang new nodes on the frontier; the `beam` of them that are reached most are the next.

        Args:
            picked: Tokens for each place of the frontier.
            rates: Learned acceptance rates, [buckets].
            beam: Most nodes to go on from.
            min_reach: Least reach to go on from.
        """
        first = len(self.tokens)
        tokens, classes, drawn_from = picked
        for index, (node, _) in enumerate(self.frontier):
            most = 1.0
            for pick in np.flatnonzero(tokens[index] >= 0).tolist():
                self._add(node, int(tokens[index, pick]), int(classes[index, pick]), rates, most)
                # Few tests make a rate uncertain: what is less likely must not come first for that.
                most = min(most, float(rates[self.buckets[-1]]))
                if drawn_from is not None:
                    self.drawn_from.append(drawn_from[index, pick])
        new = sorted(range(first, len(self.tokens)), key=lambda n: -self.reach[n])
        self.frontier = [(node, 0) for node in new[:beam] if self.reach[node] >= min_reach]

    def _add(
        self, parent: int, token: int, likeliness: int, rates: np.ndarray, most: float = 1.0
    ) -> None:
        """Hang a node on another; its rate is the learned one, but no higher than `most`."""
        depth = 1 if parent == ROOT else self._depths[parent] + 1
        bucket = _bucket(depth, likeliness)
        above = 1.0 if parent == ROOT else self.reach[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(depth)
        self.buckets.append(bucket)
        self.reach.append(above * min(float(rates[bucket]), most))

    def next_chain(self) -> list[int]:
        """Token to feed behind what was kept; none where the row does not go on."""
        return [self.tokens[node] for node, _ in self.frontier]

    def next_branches(self) -> tuple[list[int], Branches]:
        """The last token of the text and all nodes to feed behind it, as `AssistantModel` does."""
        if not self.frontier:
            return [], ([], [])
        self.frontier = [
            (node, 1 + len(self._fed) + index) for index, (node, _) in enumerate(self.frontier)
        ]
        self._fed += [node for node, _ in self.frontier]
        place = {node: index for index, node in enumerate(self._fed)}
        parents = [place.get(self.parents[node], ROOT) for node in self._fed]
        return self._last, ([self.tokens[node] for node in self._fed], parents)

    def rewritten(self, tokens: list[int], rates: np.ndarray) -> Growth:
        """A chain in other tokens, each as likely as what stands at the same share of the way."""
        chain = Growth([])
        for index, token in enumerate(tokens):
            like = self.buckets[index * len(self.tokens) // len(tokens)]
            chain._add(index - 1, token, like % (TENTHS + 1), rates)
        return chain


def tree_of(growths: Sequence[Growth]) -> DraftTree:
    """The rows' drafts as one tree."""
    tree = DraftTree.from_rows((growth.tokens, growth.parents) for growth in growths)
    drawn_from = [d for growth in growths for d in growth.drawn_from]
    return replace(
        tree.with_buckets(np.array([b for growth in growths for b in growth.buckets], np.int32)),
        score=np.array([r for growth in growths for r in growth.reach], np.float32),
        probs=torch.stack(drawn_from) if drawn_from else None,
    )


def _bucket(depth: int, likeliness: int) -> int:
    depth_class = _CLASS_OF_DEPTH[depth - 1] if depth <= len(_CLASS_OF_DEPTH) else DEPTH_CLASSES - 1
    return depth_class * (TENTHS + 1) + likeliness

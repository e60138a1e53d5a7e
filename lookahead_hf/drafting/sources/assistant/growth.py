"""One row's draft while an assistant writes it, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.drafting.sources.assistant.picks import TENTHS, Picked

_CLASS_OF_DEPTH = (0, 1, 2, 2)
DEPTH_CLASSES = 4
"""Depths 1, 2, 3 to 4, and beyond."""

Branches = tuple[list[int], list[int]]
"""Token ids and parents of nodes."""


class Growth(RowDraft):
    """The draft of one row, and the nodes that it goes on from.

    Attributes:
        drawn_from: What each node was drawn from, [vocab]; empty if nothing is drawn.
        frontier: Nodes to go on from, each with the index of its logits in the latest block.
    """

    def __init__(self, chain: Sequence[int]) -> None:
        """`chain`: the tokens that are fed first; a row without any gets no draft."""
        super().__init__()
        self._last = list(chain[-1:])
        self._fed: list[int] = []
        self.drawn_from: list[torch.Tensor] = []
        self.frontier = [(ROOT, len(chain) - 1)] if chain else []

    def extend(self, picked: Picked, rates: np.ndarray, beam: int, min_reach: float) -> None:
        """Add new nodes below the frontier; the `beam` likeliest of them are the next frontier.

        Args:
            picked: Tokens for each place of the frontier.
            rates: Learned acceptance rates, [buckets].
            beam: Most nodes to go on from.
            min_reach: Least probability of a path to go on from.
        """
        first = len(self.tokens)
        tokens, classes, drawn_from = picked
        for index, (node, _) in enumerate(self.frontier):
            most = 1.0
            for pick in np.flatnonzero(tokens[index] >= 0).tolist():
                self._add(node, int(tokens[index, pick]), int(classes[index, pick]), rates, most)
                # A rate of few tests is uncertain and must not put a less likely token first.
                most = min(most, float(rates[self.buckets[-1]]))
                if drawn_from is not None:
                    self.drawn_from.append(drawn_from[index, pick])
        new = sorted(range(first, len(self.tokens)), key=lambda n: -self.scores[n])
        self.frontier = [(node, 0) for node in new[:beam] if self.scores[node] >= min_reach]

    def _add(
        self, parent: int, token: int, likeliness: int, rates: np.ndarray, most: float = 1.0
    ) -> None:
        """Add a node; its rate is the learned one, but at most `most`."""
        bucket = _bucket(self.depth_below(parent), likeliness)
        above = 1.0 if parent == ROOT else self.scores[parent]
        self.child(parent, token, bucket, above * min(float(rates[bucket]), most))

    def next_chain(self) -> list[int]:
        """The token to feed next; none if the row does not go on."""
        return [self.tokens[node] for node, _ in self.frontier]

    def next_branches(self) -> tuple[list[int], Branches]:
        """The last token of the text and all nodes to feed after it."""
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
        """A chain of other tokens, each as likely as the node at the same part of this one."""
        chain = Growth([])
        for index, token in enumerate(tokens):
            like = self.buckets[index * len(self.tokens) // len(tokens)]
            chain._add(index - 1, token, like % (TENTHS + 1), rates)
        return chain


def tree_of(growths: Sequence[Growth]) -> DraftTree:
    """The rows' drafts as one tree."""
    drawn_from = [probs for growth in growths for probs in growth.drawn_from]
    tree = DraftTree.from_drafts(growths)
    return replace(tree, probs=torch.stack(drawn_from)) if drawn_from else tree


def _bucket(depth: int, likeliness: int) -> int:
    depth_class = _CLASS_OF_DEPTH[depth - 1] if depth <= len(_CLASS_OF_DEPTH) else DEPTH_CLASSES - 1
    return depth_class * (TENTHS + 1) + likeliness

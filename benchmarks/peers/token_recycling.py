"""Token Recycling (arXiv 2408.08696): a fixed tree of the best logits after each token."""

from __future__ import annotations

import numpy as np
from replay import Contender, Seen

from lookahead_hf.draft import ROOT, DraftTree

BEST = 8

TEMPLATE_80 = ((8,), (8, 4, 3, 2, 1, 1, 1, 1)) + (
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
)
"""Children of every node, level by level from the root: the 80 nodes of the authors' version 2.2.2
(Luowaterbi/TokenRecycling 1b4c05c). A child's place among its siblings is its rank."""


def parents_and_ranks(template: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Parent and rank of every node of a template, parents first."""
    nodes: list[tuple[int, int]] = []
    level = [ROOT]
    for counts in template:
        first = len(nodes)
        for parent, count in zip(level, counts, strict=True):
            nodes.extend((parent, rank) for rank in range(count))
        level = list(range(first, len(nodes)))
    return nodes


class RecyclingTree:
    """The best next tokens of each token, arranged into a tree by a template."""

    def __init__(self, template: tuple[tuple[int, ...], ...]) -> None:
        self._nodes = parents_and_ranks(template)
        self._best: dict[int, list[int]] = {}

    def learn(self, seen: Seen) -> None:
        """Store the best next tokens; later ones replace earlier ones."""
        self._best.update(zip(seen.last.tolist(), seen.top_ids[:, :BEST].tolist(), strict=True))

    def best_after(self, token: int) -> list[int]:
        """Return the best next tokens of a token; none if it is unknown."""
        return self._best.get(token, [])

    def grow(self, last: int) -> DraftTree:
        """Fill the template after a token; places without a known token are left out."""
        tokens: list[int] = []
        parents: list[int] = []
        place = {ROOT: ROOT}
        for node, (parent, rank) in enumerate(self._nodes):
            if parent not in place:
                continue
            above = last if parent == ROOT else tokens[place[parent]]
            if above in self._best:
                parents.append(place[parent])
                place[node] = len(tokens)
                tokens.append(self._best[above][rank])
        return DraftTree.from_rows([(tokens, parents)])


class TokenRecycling(Contender):
    """As published: 80 nodes, 8 next tokens per token, a table that is kept between texts.

    Like the authors' code, it does not recycle the prompt's logits.
    """

    name = "Token Recycling"
    settings = "80 nodes, best 8, kept from text to text"
    recycles = True

    def __init__(self) -> None:
        self._tree = RecyclingTree(TEMPLATE_80)

    def begin(self, tokens: np.ndarray, prompt: Seen) -> None:
        self._last = int(tokens[-1])

    def propose(self) -> DraftTree:
        return self._tree.grow(self._last)

    def observe(self, draft: DraftTree, path: list[int], emitted: np.ndarray, seen: Seen) -> None:
        self._tree.learn(seen)
        self._last = int(emitted[-1])

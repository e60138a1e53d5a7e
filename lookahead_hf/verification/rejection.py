"""Rejection sampling: the same distribution as plain's, though not the same sample for a seed.

A draft token that was drawn from `q` is accepted with probability `min(1, p / q)`, where `p` is the
target's processed distribution; where it is rejected, its next sibling is tried on what `p` has
beyond `q`, and where none is left the recovered token is drawn from that (Leviathan et al.,
arXiv:2211.17192; siblings as in SpecInfer, arXiv:2305.09781). `kernels.reject_tree` is the same for
all nodes of a tree at once; here only the nodes that the walk reaches are processed, each with its
own prefix, so any processor and criterion that the walk serves is served.
"""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree
from lookahead_hf.verification.walk import Decide, Walk


class Rejection(Walk):
    """Verifies sampled texts against `DraftTree.probs`.

    Siblings must stand in the order in which they were drawn. A draft without probabilities counts
    as certain of its tokens, which is right however they came about. The default generator decides.
    """

    name = "rejection"

    def _choices(self, logits: torch.Tensor) -> np.ndarray | None:
        return None

    def _decider(
        self,
        rows: Rows,
        row: int,
        draft: DraftTree,
        logits: torch.Tensor,
        choices: np.ndarray | None,
    ) -> Decide:
        nodes = draft.row(row)
        parents, drafted = draft.parents[nodes], draft.token_ids[nodes]

        def decide(node: int) -> tuple[int, int | None]:
            probs = self.score(rows, row, logits[row, node + 1]).softmax(-1)[0]
            children = np.flatnonzero(parents == node).tolist()
            drawn_from = [_drawn_from(draft, nodes.start + child, probs) for child in children]
            accepted, token = choose(probs, drafted[children].tolist(), drawn_from)
            return token, None if accepted is None else children[accepted]

        return decide


def choose(
    probs: torch.Tensor, drafted: list[int], drawn_from: list[torch.Tensor | None]
) -> tuple[int | None, int]:
    """Choose the next token, one of those drafted if possible.

    Args:
        probs: The target's distribution, [vocab].
        drafted: Draft tokens in the order in which they were drawn.
        drawn_from: Distribution that each was drawn from, the ones before it given, [vocab]; None
            where it was certain.

    Returns:
        Which of the drafted tokens was accepted, None if none was, and the token.
    """
    left = probs
    for index, (token, chances) in enumerate(zip(drafted, drawn_from, strict=True)):
        chance = 1.0 if chances is None else float(chances[token])
        if float(torch.rand(())) * chance < float(left[token]):
            return index, token
        if chances is None:
            left = left.index_fill(0, torch.tensor(token, device=left.device), 0.0)
        else:
            left = (left - chances).clamp_(min=0.0)
        total = left.sum()
        if not total > 0:  # only where rounding made it so: the target's distribution stands in
            left = probs
            break
        left = left / total
    return None, int(torch.multinomial(left, 1))


def _drawn_from(draft: DraftTree, node: int, like: torch.Tensor) -> torch.Tensor | None:
    """What a node was drawn from, on the device and over the vocabulary of `like`, [vocab]."""
    if draft.probs is None:
        return None
    chances = draft.probs[node]  # type: ignore[index]
    return torch.nn.functional.pad(chances.to(like), (0, len(like) - len(chances)))

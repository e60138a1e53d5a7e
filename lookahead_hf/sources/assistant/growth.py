"""Grows one row's draft level by level, from tokens picked of an assistant's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessorList

from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.drafting.topk import BestTokens
from lookahead_hf.logits.row_processors import SCORES_ONLY, RowProcessors
from lookahead_hf.sources.assistant.model import Branches

_CLASS_OF_DEPTH = (0, 1, 2, 2, 3)
DEPTH_CLASSES = 4
"""Depths 1, 2, 3 to 4, and beyond."""

TENTHS = 10
"""Classes of likeliest tokens, by tenths of probability; drawn tokens have their own class."""

NUM_BUCKETS = DEPTH_CLASSES * (TENTHS + 1)

DRAWN_PRIOR = 0.6

Picked = tuple[np.ndarray, np.ndarray, torch.Tensor | None]
"""Token ids and classes, [places, picks]; their distributions, [places, picks, vocab]."""


class Likeliest:
    """Picks the likeliest tokens without random numbers."""

    def __init__(self, num_picks: int, vocab_size: int | None) -> None:
        """Pick `num_picks` tokens per place, with ids below `vocab_size`."""
        self._num_picks, self._vocab_size = num_picks, vocab_size

    def begin(self, device: torch.device) -> None:
        """Nothing to prepare."""

    def pick(self, logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> Picked:
        """Pick tokens after places of rows, [places] each; logits are [rows, width, vocab]."""
        best = BestTokens(logits[..., : self._vocab_size], self._num_picks)
        tokens, probs = best.take(rows, places)
        return tokens, np.minimum(probs * TENTHS, TENTHS - 1).astype(np.int32), None


class Drawn:
    """Draws tokens, for rejection sampling.

    A drawn token must not decide whether it is verified. So every place gets the same number of
    tokens, all of one class.
    """

    def __init__(self, num_picks: int, vocab_size: int | None, processors: Sequence[Any]) -> None:
        """Shape the distribution by those of the call's processors that only read the scores."""
        known = LogitsProcessorList(p for p in processors if type(p) in SCORES_ONLY)
        self._processors = RowProcessors(known, 1)
        self._num_picks, self._vocab_size = num_picks, vocab_size

    def begin(self, device: torch.device) -> None:
        """Seed a separate generator with one draw from the default one."""
        self._generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))

    def pick(self, logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> Picked:
        """Draw the tokens of each place without replacement; see `Likeliest.pick`."""
        at = torch.from_numpy(rows), torch.from_numpy(places)
        picked = [self._draw(row) for row in logits[at]]
        tokens = torch.stack([tokens for tokens, _ in picked]).cpu().numpy()
        drawn_from = torch.stack([drawn_from for _, drawn_from in picked])
        return tokens, np.full(tokens.shape, TENTHS, np.int32), drawn_from

    def _draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens, [picks], with what each was drawn from, [picks, vocab]."""
        probs = self._distribution(logits)
        noise = torch.empty_like(probs).exponential_(generator=self._generator)
        # The largest of p / noise are draws without replacement, in their order.
        tokens = (probs / noise).topk(self._num_picks).indices
        left = probs.repeat(self._num_picks, 1)
        for pick in range(1, self._num_picks):
            left[pick:, tokens[pick - 1]] = 0.0
        total = left.sum(1, keepdim=True)
        certain = torch.nn.functional.one_hot(tokens, len(probs)).to(left)
        # If nothing is left to draw from, the token was not drawn: it has probability 1.
        named = left.gather(1, tokens[:, None]) == 0
        return tokens, torch.where(named, certain, left / total)

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token's distribution over the target's vocabulary, [vocab] float32."""
        scores = logits[None, : self._vocab_size].to(copy=True, dtype=torch.float32)
        if not self._processors.empty:
            scores = self._processors(0, torch.empty(1, 0, dtype=torch.long), scores)
        probs = scores.softmax(-1)[0]
        missing = 0 if self._vocab_size is None else self._vocab_size - len(probs)
        return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs


class Growth(RowDraft):
    """The draft of one row, and the nodes that it goes on from.

    Attributes:
        drawn_from: What each node was drawn from, [vocab]; empty if nothing is drawn.
        frontier: Nodes to go on from, each with the index of its logits in the latest block.
    """

    def __init__(self, chain: Sequence[int]) -> None:
        """Start after the tokens that are fed first; a row without any gets no draft."""
        super().__init__()
        self._last = list(chain[-1:])
        self._fed: list[int] = []
        self.drawn_from: list[torch.Tensor] = []
        self.frontier = [(ROOT, len(chain) - 1)] if chain else []

    def extend(self, picked: Picked, rates: np.ndarray, beam: int, min_reach: float) -> None:
        """Add nodes below the frontier, from the tokens picked for each of its places.

        The `beam` likeliest of them are the next frontier, except paths less likely than
        `min_reach`.
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
        depth = min(self.depth_below(parent), len(_CLASS_OF_DEPTH))
        bucket = _CLASS_OF_DEPTH[depth - 1] * (TENTHS + 1) + likeliness
        above = 1.0 if parent == ROOT else self.scores[parent]
        self.child(parent, token, bucket, above * min(float(rates[bucket]), most))

    def next_chain(self) -> list[int]:
        """Return the token to feed next; none if the row does not go on."""
        return [self.tokens[node] for node, _ in self.frontier]

    def next_branches(self) -> tuple[list[int], Branches]:
        """Return the last token of the text and all nodes to feed after it."""
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
        """Return a chain of other tokens, each as likely as the node at the same part of it."""
        chain = Growth([])
        for index, token in enumerate(tokens):
            like = self.buckets[index * len(self.tokens) // len(tokens)]
            chain._add(index - 1, token, like % (TENTHS + 1), rates)
        return chain


def prior_rates() -> np.ndarray:
    """Return the acceptance rates of all buckets before learning, [buckets] float32."""
    of_tenths = 0.02 + 0.9 * (np.arange(TENTHS) + 0.5) / TENTHS
    return np.tile([*of_tenths, DRAWN_PRIOR], DEPTH_CLASSES).astype(np.float32)


def tree_of(growths: Sequence[Growth]) -> DraftTree:
    drawn_from = [probs for growth in growths for probs in growth.drawn_from]
    tree = DraftTree.from_drafts(growths)
    return replace(tree, probs=torch.stack(drawn_from)) if drawn_from else tree

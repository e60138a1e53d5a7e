"""Grows one row's draft level by level, from tokens picked of a source's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessorList

from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.drafting.drafter import BestTokens
from lookahead_hf.logits.row_processors import SCORES_ONLY

_CLASS_OF_DEPTH = (0, 1, 2, 2, 3)
DEPTH_CLASSES = 4  # Depths 1, 2, 3 to 4, and beyond

TENTHS = 10
"""Classes of likeliest tokens, by tenths of probability; drawn tokens have their own class."""

NUM_BUCKETS = DEPTH_CLASSES * (TENTHS + 1)

DRAWN_PRIOR = 0.6

Picked = tuple[np.ndarray, np.ndarray, torch.Tensor | None]
"""Token ids and classes, [places, picks]; what the tokens were drawn from, [places, vocab]."""


class Likeliest:
    """Picks the likeliest tokens without random numbers."""

    def __init__(self, num_picks: int, vocab_size: int | None) -> None:
        """Pick `num_picks` tokens per place, with ids below `vocab_size`."""
        self._num_picks, self._vocab_size = num_picks, vocab_size

    def pick(self, logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> Picked:
        """Pick tokens after places of rows, [places] each; logits are [rows, width, vocab]."""
        best = BestTokens(logits[..., : self._vocab_size], self._num_picks)
        tokens, probs = best.take(rows, places)
        return tokens, np.minimum(probs * TENTHS, TENTHS - 1).astype(np.int32), None


class Drawn:
    """Draws one token per place for rejection sampling, all of one class: none sways a draft."""

    def __init__(self, vocab_size: int | None, processors: Sequence[Any]) -> None:
        """Shape the distribution by those of the call's processors that only read the scores."""
        self._processors = LogitsProcessorList(p for p in processors if type(p) in SCORES_ONLY)
        self._vocab_size = vocab_size
        self._generator: torch.Generator | None = None

    def pick(self, logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> Picked:
        """Draw the tokens of the places by a generator of its own; see `Likeliest.pick`."""
        probs = self._distributions(logits[torch.from_numpy(rows), torch.from_numpy(places)])
        if self._generator is None:
            seed = int(torch.randint(2**62, ()))
            self._generator = torch.Generator(probs.device).manual_seed(seed)
        noise = torch.empty_like(probs).exponential_(generator=self._generator)
        tokens = (probs / noise).argmax(-1, keepdim=True).cpu().numpy()
        return tokens, np.full(tokens.shape, TENTHS, np.int32), probs

    def _distributions(self, logits: torch.Tensor) -> torch.Tensor:
        """Return distributions over the target's vocabulary, [places, vocab] float32."""
        scores = logits[:, : self._vocab_size].to(copy=True, dtype=torch.float32)
        none = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
        probs: torch.Tensor = self._processors(none, scores).softmax(-1)
        missing = 0 if self._vocab_size is None else self._vocab_size - probs.shape[1]
        return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs


class Growth(RowDraft):
    """The draft of one row.

    Attributes:
        ends: The nodes that it goes on from; none where it stops.
        drawn_from: What each node was drawn from, [vocab]; empty if nothing is drawn.
    """

    def __init__(self, goes_on: bool = True) -> None:
        super().__init__()
        self.ends = [ROOT] if goes_on else []
        self.drawn_from: list[torch.Tensor] = []

    def extend(
        self,
        tokens: np.ndarray,
        classes: np.ndarray,
        rates: np.ndarray,
        *,
        breadth: int = 1,
        min_reach: float = 0.0,
    ) -> None:
        """Add tokens below every end, [picks], the likeliest first.

        The `breadth` likeliest of them are the new ends, except those that are reached less often
        than `min_reach`.
        """
        first = len(self.tokens)
        for parent in self.ends:
            most = 1.0
            for pick in np.flatnonzero(tokens >= 0).tolist():
                self._add(parent, int(tokens[pick]), int(classes[pick]), rates, most)
                # A rate of few tests is uncertain and must not put a less likely token first.
                most = min(most, float(rates[self.buckets[-1]]))
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self.scores[node])
        self.ends = [node for node in new[:breadth] if self.scores[node] >= min_reach]

    def _add(
        self, parent: int, token: int, likeliness: int, rates: np.ndarray, most: float = 1.0
    ) -> None:
        """Add a node; its rate is the learned one, but at most `most`."""
        depth = min(self.depth_below(parent), len(_CLASS_OF_DEPTH))
        bucket = _CLASS_OF_DEPTH[depth - 1] * (TENTHS + 1) + likeliness
        above = 1.0 if parent == ROOT else self.scores[parent]
        self.child(parent, token, bucket, above * min(float(rates[bucket]), most))

    def rewritten(self, tokens: list[int], rates: np.ndarray) -> Growth:
        """Return a chain of other tokens, each as likely as the node at the same part of it."""
        chain = Growth()
        for index, token in enumerate(tokens):
            like = self.buckets[index * len(self.tokens) // len(tokens)]
            chain._add(index - 1, token, like % (TENTHS + 1), rates)
        return chain


def prior_rates() -> np.ndarray:
    """Return the acceptance rates of all buckets before learning, [buckets] float32."""
    of_tenths = 0.02 + 0.9 * (np.arange(TENTHS) + 0.5) / TENTHS
    return np.tile([*of_tenths, DRAWN_PRIOR], DEPTH_CLASSES).astype(np.float32)


def tree_of(growths: Sequence[Growth]) -> DraftTree:
    """Join the drafts of the rows, with the distributions that nodes were drawn from."""
    drawn_from = [probs for growth in growths for probs in growth.drawn_from]
    tree = DraftTree.from_drafts(growths)
    return replace(tree, probs=torch.stack(drawn_from)) if drawn_from else tree

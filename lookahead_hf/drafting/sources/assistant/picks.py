"""Picks tokens from an assistant's logits: the likeliest, or drawn ones with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessorList

from lookahead_hf.drafting.topk import BestTokens
from lookahead_hf.logits.row_processors import SCORES_ONLY, RowProcessors

TENTHS = 10
"""Classes of likeliest tokens, by tenths of probability; drawn tokens have their own class."""

Picked = tuple[np.ndarray, np.ndarray, torch.Tensor | None]
"""Token ids and classes, [places, picks]; their distributions, [places, picks, vocab]."""


class Likeliest:
    """Picks the likeliest tokens; no random number is drawn."""

    def __init__(self, num_picks: int, vocab_size: int | None) -> None:
        """Pick `num_picks` tokens per place, with ids below `vocab_size`."""
        self._num_picks, self._vocab_size = num_picks, vocab_size

    def begin(self, device: torch.device) -> None:
        """Nothing to prepare."""

    def pick(self, logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> Picked:
        """Pick tokens to follow certain places.

        Args:
            logits: The assistant's, [rows, width, vocab].
            rows: Row of each place, [places].
            places: The places, [places].
        """
        best = BestTokens(logits[..., : self._vocab_size], self._num_picks)
        tokens, probs = best.take(rows, places)
        return tokens, np.minimum(probs * TENTHS, TENTHS - 1).astype(np.int32), None


class Drawn:
    """Draws tokens, for rejection sampling.

    A drawn token must not decide whether it is verified. So every place gets the same number of
    tokens, and all have one class.
    """

    def __init__(self, num_picks: int, vocab_size: int | None, processors: Sequence[Any]) -> None:
        """`processors`: the call's; those that only read the scores shape the distribution."""
        known = LogitsProcessorList(p for p in processors if type(p) in SCORES_ONLY)
        self._processors = RowProcessors(known, 1)
        self._num_picks, self._vocab_size = num_picks, vocab_size

    def begin(self, device: torch.device) -> None:
        """Seed a separate generator with one draw from the default one."""
        self._generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))

    def pick(self, logits: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> Picked:
        """See `Likeliest.pick`; a place's tokens are drawn without replacement."""
        at = torch.from_numpy(rows), torch.from_numpy(places)
        picked = [self._draw(row) for row in logits[at]]
        tokens = torch.stack([tokens for tokens, _ in picked]).cpu().numpy()
        drawn_from = torch.stack([drawn_from for _, drawn_from in picked])
        return tokens, np.full(tokens.shape, TENTHS, np.int32), drawn_from

    def _draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, [picks], and the distribution of each given the earlier ones, [picks, vocab]."""
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
        """The distribution of the next token over the target's vocabulary, [vocab] float32."""
        scores = logits[None, : self._vocab_size].to(copy=True, dtype=torch.float32)
        if not self._processors.empty:
            scores = self._processors(0, torch.empty(1, 0, dtype=torch.long), scores)
        probs = scores.softmax(-1)[0]
        missing = 0 if self._vocab_size is None else self._vocab_size - len(probs)
        return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs

"""The target's best logits after the contexts it has seen, keyed by the last tokens."""

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool import _logits_numba as compiled
from lookahead_hf.ngram_pool._logits_numba import WAYS


class LogitsMemory:
    """The k likeliest next tokens of contexts, keyed by their last two tokens and by the last one.

    A bounded hash table in flat arrays, `keys` [places, ways] and `tokens` and `probs` [places *
    ways, k]: a new entry replaces the oldest one of a full place. Free keys and missing tokens are
    -1.
    """

    def __init__(self, top_k: int, capacity: int) -> None:
        """Keep `top_k` tokens for each of at least `capacity` contexts."""
        places = 1
        while places * WAYS < capacity:
            places *= 2
        self.keys = np.full((places, WAYS), -1, np.int64)
        self.tokens = np.empty((places * WAYS, top_k), np.int32)
        self.probs = np.empty((places * WAYS, top_k), np.float32)
        self._stamps = np.zeros((places, WAYS), np.int64)
        self._clock = 0

    def remember(
        self, before: np.ndarray, last: np.ndarray, tokens: np.ndarray, probs: np.ndarray
    ) -> None:
        """Store what the target expects after contexts; later ones overwrite earlier ones.

        `before` and `last` are the last two tokens, -1: none, [contexts] int64; `tokens` and
        `probs` the likeliest next ones, best first, [contexts, top_k or more].
        """
        held = self.keys, self._stamps, self.tokens, self.probs, self._clock
        self._clock = compiled.remember(*held, before, last, tokens, probs)


def top_rows(
    bits: np.ndarray, which: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the best tokens of some rows of logits, with approximate probabilities.

    `bits` are [rows, vocab]: int16 of bfloat16 or int32 of float32. In each of the rows `which`,
    [wanted], `counts`, [wanted], tokens are found: best first, the lower id first among equals, -1
    beyond the row's count, [wanted, most of counts].
    """
    shape = len(which), int(counts.max(initial=0))
    tokens, probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    compiled.top_rows(bits, which, counts, tokens, probs)
    return tokens, probs

"""The target's best logits after the contexts it has seen, keyed by the last tokens."""

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool import _logits_numba as compiled
from lookahead_hf.ngram_pool._logits_numba import WAYS


class LogitsMemory:
    """The k likeliest next tokens of contexts, keyed by their last two tokens and by the last one.

    A bounded hash table in flat arrays: a new entry replaces the oldest one of a full place.

    Attributes:
        keys: Contexts, [places, ways] int64, -1 where free.
        tokens: Next tokens of each entry, likeliest first, [places * ways, k] int32, -1: none.
        probs: Their probabilities, [places * ways, k] float32.
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

        Args:
            before: Token before the last one, -1: none, [contexts] int64.
            last: Last token, [contexts] int64.
            tokens: Likeliest next tokens, best first, -1: none, [contexts, top_k or more] int32.
            probs: Their probabilities, the same shape, float32.
        """
        self._clock = compiled.remember(
            self.keys, self._stamps, self.tokens, self.probs, self._clock,
            before, last, tokens, probs,
        )  # fmt: skip


def top_rows(
    bits: np.ndarray, which: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the best tokens of rows of logits, with approximate probabilities.

    Args:
        bits: Bit patterns, [rows, vocab]: int16 of bfloat16 or int32 of float32.
        which: Rows to search, [wanted] int64.
        counts: Tokens to find in each of them, [wanted] int64.

    Returns:
        tokens: Best first, the lower id first among equals, -1 beyond the row's count,
            [wanted, most of counts] int32.
        probs: Their probabilities, the same shape, float32.
    """
    shape = len(which), int(counts.max(initial=0))
    tokens, probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    compiled.top_rows(bits, which, counts, tokens, probs)
    return tokens, probs

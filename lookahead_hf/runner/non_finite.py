"""Drafts with K or V that are not finite, which masks do not hold back: zero times NaN is NaN."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotCache

_NUM_SAMPLED = 8
"""Logits of a token that are looked at; one NaN in its hidden states makes NaN of all of them."""


def has_nan(logits: torch.Tensor) -> torch.Tensor:
    """Count NaN in a sample of the logits, [rows, width, vocab], of each row: [rows] int64."""
    sample = logits[:, :, :: max(1, logits.shape[2] // _NUM_SAMPLED)]
    return (sample != sample).sum((1, 2))


def clear(cache: SlotCache) -> None:
    """Set K and V behind the kept tokens of every row to zero, in all layers."""
    for group in cache.each_group():
        for row, length in enumerate(group.lengths.tolist()):
            for store in group.stores:
                store[row, length:] = 0


class Watch:
    """Distinguishes rows that a draft has contaminated from rows that are NaN by themselves."""

    def __init__(self, num_rows: int) -> None:
        self._by_itself = np.zeros(num_rows, bool)

    def is_contaminated(self, has_nan: np.ndarray, live: np.ndarray) -> bool:
        """Whether a draft may have contaminated the logits of a live row.

        Args:
            has_nan: As returned by `has_nan`, on the host, [rows].
            live: Rows whose text goes on, [rows] bool.
        """
        return bool(((has_nan > 0) & live & ~self._by_itself).any())

    def observe_repeat(self, has_nan: np.ndarray) -> None:
        """Note the rows, [rows], that are NaN in cleared slots and without a draft."""
        self._by_itself |= has_nan > 0

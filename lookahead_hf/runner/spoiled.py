"""Drafts with K or V that are not finite, which masks do not hold back: zero times NaN is NaN."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotCache

_NUM_LOOKED_AT = 8
"""Logits of a token that are looked at; one NaN in its hidden states makes NaN of all of them."""


def not_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether NaN is among the logits of any token: [rows, width, vocab] -> [rows] int64."""
    some = logits[:, :, :: max(1, logits.shape[2] // _NUM_LOOKED_AT)]
    return (some != some).sum((1, 2))


def clear(cache: SlotCache) -> None:
    """Zero what stands behind every row's kept tokens, in all layers."""
    for group in cache.each_group():
        for row, length in enumerate(group.lengths.tolist()):
            for store in group.stores:
                store[row, length:] = 0


class Watch:
    """Tells a row that a draft has spoiled from one that is not finite by itself."""

    def __init__(self, num_rows: int) -> None:
        self._by_itself = np.zeros(num_rows, bool)

    def is_spoiled(self, not_finite: np.ndarray, live: np.ndarray) -> bool:
        """Whether a draft may have spoiled the logits of a live row.

        Args:
            not_finite: What the function of that name returned, on the host, [rows].
            live: Rows whose text goes on, [rows] bool.
        """
        return bool(((not_finite > 0) & live & ~self._by_itself).any())

    def without_draft(self, not_finite: np.ndarray) -> None:
        """Note the rows, [rows], that are not finite in cleared slots and without a draft."""
        self._by_itself |= not_finite > 0

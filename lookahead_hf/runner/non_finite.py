"""Drafts with K or V that are not finite, which masks do not hold back: zero times NaN is NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lookahead_hf.cache.slots import SlotCache

_NUM_SAMPLED = 8
"""Logits of a token that are looked at; one NaN in its hidden states makes NaN of all of them."""


def has_nan(logits: torch.Tensor) -> torch.Tensor:
    """Count NaN in a sample of the logits, [rows, width, vocab], of each row: [rows] int64."""
    sample = logits[:, :, :: max(1, logits.shape[2] // _NUM_SAMPLED)]
    return (sample != sample).sum((1, 2))


def clear(cache: SlotCache, rows: Iterable[int] | None = None) -> None:
    """Set K and V behind the kept tokens to zero, in all layers.

    Args:
        cache: The cache.
        rows: The rows to clear; None for all of them.
    """
    chosen = None if rows is None else set(rows)
    for group in cache.each_group():
        for row, length in enumerate(group.lengths.tolist()):
            if chosen is None or row in chosen:
                for store in group.stores:
                    store[row, length:] = 0

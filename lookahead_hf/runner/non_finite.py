"""Drafts whose K or V are not finite; no mask hides them, since zero times NaN is NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lookahead_hf.cache.slots import SlotCache

_NUM_SAMPLED = 8
"""Sampled logits of a token; one NaN in its hidden states makes all of them NaN."""


def has_nan(logits: torch.Tensor) -> torch.Tensor:
    """Count NaN in a sample of the logits, [rows, width, vocab], of each row: [rows] int64."""
    sample = logits[:, :, :: max(1, logits.shape[2] // _NUM_SAMPLED)]
    return (sample != sample).sum((1, 2))


def clear(cache: SlotCache, rows: Iterable[int] | None = None) -> None:
    """Set K and V behind the kept tokens to zero, in all layers, of some rows or (None) of all."""
    chosen = None if rows is None else set(rows)
    for group in cache.each_group():
        for row, length in enumerate(group.lengths.tolist()):
            if chosen is None or row in chosen:
                for store in group.stores:
                    store[row, length:] = 0

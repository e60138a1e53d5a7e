"""The logits memory in plain numpy: what its compiled functions must find."""

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool.logits_memory import LANES, WAYS


def top_rows(
    bits: np.ndarray,  # [rows, vocab] int16 (bfloat16) or int32 (float32) bit patterns
    which: np.ndarray,  # [wanted] int64, rows to look at
    counts: np.ndarray,  # [wanted] int64, tokens to find in each
    tokens: np.ndarray,  # [wanted, most] int32, written
    probs: np.ndarray,  # [wanted, most] float32, written
) -> None:
    """The best tokens of each wanted row, best first (the lower id where two are equal).

    Probabilities are relative to the lanes' maxima only, not to the whole row: on a 135M model that
    moves 1 % of the values into another tenth. A row whose best is NaN or infinite yields nothing.
    Unused places hold token -1 and probability 0.
    """
    for out, (row, count) in enumerate(zip(bits[which], counts, strict=True)):
        if bits.dtype == np.int16:
            values = (row.astype(np.int32) << 16).view(np.float32)
        else:
            values = row.view(np.float32)
        order = np.lexsort((np.arange(len(row)), -values))[:count]
        top = values[order[0]]
        tokens[out], probs[out] = -1, 0.0
        if not np.isfinite(top) or np.isnan(values).any():
            continue
        lanes = min(LANES, len(row))
        padded = np.full(-(-len(row) // lanes) * lanes, -np.inf, np.float32)
        padded[: len(row)] = values
        maxima = padded.reshape(-1, lanes).max(0)
        total = np.exp(maxima - top).sum(dtype=np.float64)
        tokens[out, : len(order)] = order
        probs[out, : len(order)] = np.exp(values[order] - top) / total


def find(
    keys: np.ndarray,  # [places, WAYS] int64
    before: int,
    last: int,
) -> int:
    """Entry of the context `(before, last)`, or of `last` alone where `before` is -1; -1: none."""
    hits = np.flatnonzero(keys.ravel() == ((before + 1) << 32 | last))
    return int(hits[0]) if len(hits) else -1


def remember(
    keys: np.ndarray,  # [places, WAYS] int64, -1: free; changed in place
    stamps: np.ndarray,  # [places, WAYS] int64, when the entry was written; changed in place
    tokens: np.ndarray,  # [places * WAYS, k] int32, changed in place
    probs: np.ndarray,  # [places * WAYS, k] float32, changed in place
    clock: int,
    before: np.ndarray,  # [contexts] int64, -1: unknown
    last: np.ndarray,  # [contexts] int64
    new_tokens: np.ndarray,  # [contexts, k] int32
    new_probs: np.ndarray,  # [contexts, k] float32
) -> int:
    """Write what follows each context under its last token and under its last two.

    A known context is overwritten. A new one takes a free entry of its place, or the oldest one.

    Returns:
        The clock after the last context.
    """
    for row in range(len(last)):
        if new_tokens[row, 0] < 0:
            continue
        clock += 1
        for first in (-1, before[row]) if before[row] >= 0 else (-1,):
            key = (int(first) + 1) << 32 | int(last[row])
            place = (key * 0x9E3779B97F4A7C15 & (2**64 - 1)) >> 32 & (len(keys) - 1)
            known = np.flatnonzero(keys[place] == key)
            way = int(known[0]) if len(known) else int(stamps[place].argmin())
            keys[place, way], stamps[place, way] = key, clock
            tokens[place * WAYS + way] = new_tokens[row]
            probs[place * WAYS + way] = new_probs[row]
    return clock

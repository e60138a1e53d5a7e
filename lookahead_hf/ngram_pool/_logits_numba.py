"""Compiled functions of the logits memory; `tests/oracles/logits_memory.py` has them in numpy.

Finding the best logits reads the row once, lane by lane: lane `i` holds the elements `i`,
`i + lanes`, `i + 2 lanes`, ... so that one vector instruction advances many lanes. The k best
elements are in lanes whose maximum reaches the k-th largest maximum; only those are read again.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool.jit import jit

LANES = 1024
"""Lanes of a row of logits: 48 elements each for a vocabulary of 49,152."""

WAYS = 4
"""Entries that share one place of the hash table; the oldest of them is replaced."""


@jit
def top_rows(bits, which, tokens, probs):
    lanes = min(LANES, bits.shape[1])
    maxima = np.empty(lanes, bits.dtype)
    best = np.empty(tokens.shape[1], bits.dtype)
    # Bit patterns and, in the same memory, the numbers that they encode.
    lane_bits = np.empty(lanes, np.int32)
    best_bits = np.empty(tokens.shape[1], np.int32)
    lane_values, best_values = lane_bits.view(np.float32), best_bits.view(np.float32)
    for out in range(len(which)):
        row = bits[which[out]]
        _lane_maxima(row, maxima)
        count = _select(row, maxima, tokens[out], best)
        _decode(maxima, lane_bits)
        _decode(best, best_bits)
        total = _sum_of_exp(lane_values, best_values[0])
        if not total >= 0.5:
            count = 0
        for rank in range(count):
            probs[out, rank] = np.exp(best_values[rank] - best_values[0]) / total
        tokens[out, count:] = -1
        probs[out, count:] = 0.0


@jit
def _sum_of_exp(values, top):
    """Sum of `exp(values - top)`; NaN if one of them is."""
    total = 0.0
    for value in values:
        total += np.exp(value - top)
    return total


@jit
def _key(pattern, lowest):
    """A float's bit pattern as an integer that sorts like the float; its own inverse.

    Negative floats sort backwards; `lowest` is the least integer of their width.
    """
    return pattern if pattern >= 0 else lowest - 1 - pattern


@jit
def _lane_maxima(row, maxima):
    lanes, lowest = len(maxima), np.iinfo(row.dtype).min
    for lane in range(lanes):
        maxima[lane] = _key(row[lane], lowest)
    for start in range(lanes, len(row), lanes):
        block = row[start : start + lanes]
        for lane in range(len(block)):
            maxima[lane] = max(maxima[lane], row.dtype.type(_key(block[lane], lowest)))


@jit
def _decode(keys, patterns):
    """Turn keys back into bit patterns of float32, of which bfloat16 is the upper half."""
    lowest = np.iinfo(keys.dtype).min
    shift = 16 if lowest == np.iinfo(np.int16).min else 0
    for i in range(len(keys)):
        patterns[i] = _key(keys[i], lowest) << shift


@jit
def _select(row, maxima, tokens, best):
    """Fill `tokens` and `best` with the largest elements and their keys; returns how many."""
    lanes, k, lowest = len(maxima), len(tokens), np.iinfo(row.dtype).min
    threshold = _nth_largest(maxima, best)
    count = 0
    for lane in range(lanes):
        if maxima[lane] >= threshold:
            for token in range(lane, len(row), lanes):
                key = row.dtype.type(_key(row[token], lowest))
                if key >= threshold and (count < k or key >= best[k - 1]):
                    count = _insert(key, token, tokens, best, count)
    return count


@jit
def _nth_largest(values, best):
    """The value that ends the descending list of the `len(best)` largest ones, kept in `best`."""
    count = 0
    for value in values:
        if count == len(best):
            if value <= best[count - 1]:
                continue
            count -= 1
        place = count
        count += 1
        while place > 0 and best[place - 1] < value:
            best[place] = best[place - 1]
            place -= 1
        best[place] = value
    return best[count - 1]


@jit
def _insert(key, token, tokens, best, count):
    """Insert `token` into the descending list unless better ones fill it; returns its length."""
    k = len(tokens)
    place = count
    while place > 0 and (
        key > best[place - 1] or (key == best[place - 1] and token < tokens[place - 1])
    ):
        place -= 1
    if place == k:
        return count
    for i in range(min(count, k - 1), place, -1):
        best[i] = best[i - 1]
        tokens[i] = tokens[i - 1]
    best[place] = key
    tokens[place] = token
    return min(count + 1, k)


@jit
def find(keys, before, last):
    """The entry of `(before, last)`, or of `last` alone if `before` is -1; -1: none."""
    key = (np.int64(before + 1) << 32) | np.int64(last)
    ways = _ways_of(keys, key)
    for way in range(WAYS):
        if keys[ways, way] == key:
            return ways * WAYS + way
    return -1


@jit
def remember(keys, stamps, tokens, probs, clock, before, last, new_tokens, new_probs):
    for row in range(len(last)):
        if new_tokens[row, 0] < 0:
            continue
        clock += 1
        _write(keys, stamps, tokens, probs, clock, -1, last[row], new_tokens[row], new_probs[row])
        if before[row] >= 0:
            _write(
                keys, stamps, tokens, probs, clock, before[row], last[row],
                new_tokens[row], new_probs[row],
            )  # fmt: skip
    return clock


@jit
def _ways_of(keys, key):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(keys) - 1))


@jit
def _write(keys, stamps, tokens, probs, clock, before, last, new_tokens, new_probs):
    key = (np.int64(before + 1) << 32) | np.int64(last)
    ways = _ways_of(keys, key)
    oldest = 0
    for way in range(WAYS):
        if keys[ways, way] == key:
            oldest = way
            break
        if stamps[ways, way] < stamps[ways, oldest]:
            oldest = way
    keys[ways, oldest] = key
    stamps[ways, oldest] = clock
    slot = ways * WAYS + oldest
    for rank in range(tokens.shape[1]):
        tokens[slot, rank] = new_tokens[rank]
        probs[slot, rank] = new_probs[rank]

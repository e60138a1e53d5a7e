"""The target's best logits after the contexts it has seen, keyed by the last tokens.

The search for the best logits reads a row once, in lanes: lane `i` holds the elements `i`, `i +
lanes`, `i + 2 lanes`, ... so that one vector instruction advances many lanes. The k best elements
are in lanes whose maximum reaches the k-th largest maximum; only those are read again.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool.jit import jit, jit_inner

LANES = 1024  # Lanes of a row of logits: 48 elements each for a vocabulary of 49,152
WAYS = 4  # Entries that share one place of the hash table; the oldest of them is replaced


@jit
def _top_rows(bits, which, counts, tokens, probs):
    lanes, most = min(LANES, bits.shape[1]), tokens.shape[1]
    maxima, found = np.empty(lanes, bits.dtype), np.empty(most, np.int64)
    best = np.zeros(most, bits.dtype)
    # Bit patterns and, in the same memory, the numbers that they encode.
    lane_bits, best_bits = np.empty(lanes, np.int32), np.empty(most, np.int32)
    lane_values, best_values = lane_bits.view(np.float32), best_bits.view(np.float32)
    for out in range(len(which)):
        row = bits[which[out]]
        _lane_maxima(row, maxima)
        count = _select(row, maxima, found[: counts[out]])
        for rank in range(count):
            best[rank], tokens[out, rank] = found[rank] >> 32, ~np.int32(found[rank])
        _decode(maxima, lane_bits)
        _decode(best, best_bits)
        if not (np.isfinite(best_values[0]) and best_values[count - 1] <= best_values[0]):
            count = 0
        total = _sum_of_exp(lane_values, best_values[0])
        for rank in range(count):
            probs[out, rank] = np.exp(best_values[rank] - best_values[0]) / total
        tokens[out, count:] = -1
        probs[out, count:] = 0.0


@jit_inner
def _sum_of_exp(values, top):
    """Return the sum of `exp(values - top)` within 2 %; overwrite `values`.

    For vector instructions, `exp(x)` is taken as `(1 + x / 1024) ** 1024`, ten squarings, and whole
    numbers are added, whose order does not matter.
    """
    for i in range(len(values)):
        power = np.float32(1.0) + (values[i] - top) * np.float32(1 / 1024)
        power = power if power > np.float32(0.0) else np.float32(0.0)
        for _ in range(10):
            power *= power
        values[i] = power
    total = 0
    for i in range(len(values)):
        total += int(values[i] * np.float32(1 << 20))
    return total / (1 << 20)


@jit_inner
def _key(pattern, lowest):
    """Return a float's bit pattern as an integer that sorts like the float; its own inverse.

    Negative floats sort backwards; `lowest` is the least integer of their width.
    """
    return pattern if pattern >= 0 else lowest - 1 - pattern


@jit_inner
def _lane_maxima(row, maxima):
    """Fill `maxima`, four parts of the row side by side: waits for different pages overlap."""
    lanes, lowest, kind = len(maxima), np.iinfo(row.dtype).min, row.dtype.type
    part = len(row) // (4 * lanes) * lanes
    maxima[:] = lowest
    for start in range(0, part, lanes):
        one = row[start : start + lanes]
        two = row[part + start : part + start + lanes]
        three = row[2 * part + start : 2 * part + start + lanes]
        four = row[3 * part + start : 3 * part + start + lanes]
        for lane in range(lanes):
            left = max(kind(_key(one[lane], lowest)), kind(_key(two[lane], lowest)))
            right = max(kind(_key(three[lane], lowest)), kind(_key(four[lane], lowest)))
            maxima[lane] = max(maxima[lane], max(left, right))
    for start in range(4 * part, len(row), lanes):
        block = row[start : start + lanes]
        for lane in range(len(block)):
            maxima[lane] = max(maxima[lane], kind(_key(block[lane], lowest)))


@jit_inner
def _decode(keys, patterns):
    """Turn keys back into bit patterns of float32, of which bfloat16 is the upper half."""
    lowest = np.iinfo(keys.dtype).min
    shift = 16 if lowest == np.iinfo(np.int16).min else 0
    for i in range(len(keys)):
        patterns[i] = _key(keys[i], lowest) << shift


@jit_inner
def _select(row, maxima, found):
    """Fill `found` with the largest elements, best first; return their number.

    An element is its key above the complement of its token: the lower token is the larger number.
    """
    lanes, k, lowest = len(maxima), len(found), np.iinfo(row.dtype).min
    threshold, count = _threshold(maxima, min(k, lanes)), 0
    for lane in range(lanes):
        if maxima[lane] >= threshold:
            for token in range(lane, len(row), lanes):
                key = row.dtype.type(_key(row[token], lowest))
                if key >= threshold:
                    count = _insert(
                        np.int64(key) << 32 | np.int64(0xFFFFFFFF - token), found, count
                    )
                    if count == k:
                        threshold = row.dtype.type(found[k - 1] >> 32)
    return count


@jit_inner
def _threshold(maxima, k):
    """Return a number that at least `k` of the maxima reach, and hardly more, by bisection."""
    low = high = maxima[0]
    for lane in range(len(maxima)):
        low, high = min(low, maxima[lane]), max(high, maxima[lane])
    low, high = np.int64(low), np.int64(high) + 1
    while high - low > 1:
        middle = (low + high) // 2
        reach = _num_reach(maxima, maxima.dtype.type(middle))
        if reach < k:
            high = middle
        else:
            low = middle
            if reach <= k + k // 4:
                break
    return maxima.dtype.type(low)


@jit_inner
def _num_reach(maxima, threshold):
    count = np.int16(0)  # the narrowest that holds `LANES`: more of them in a vector
    for lane in range(len(maxima)):
        count = np.int16(count + np.int16(maxima[lane] >= threshold))
    return count


@jit_inner
def _insert(value, best, count):
    """Insert a value into a descending list unless larger ones fill it; return its length."""
    if count == len(best):
        if value <= best[count - 1]:
            return count
        count -= 1
    place = count
    while place > 0 and best[place - 1] < value:
        best[place] = best[place - 1]
        place -= 1
    best[place] = value
    return count + 1


@jit_inner
def find(keys, before, last):
    """Return the entry of `(before, last)`, or of `last` alone if `before` is -1; -1: none."""
    key = (np.int64(before + 1) << 32) | np.int64(last)
    ways = _ways_of(keys, key)
    for way in range(WAYS):
        if keys[ways, way] == key:
            return ways * WAYS + way
    return -1


@jit
def _remember(keys, stamps, tokens, probs, clock, before, last, new_tokens, new_probs):
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


@jit_inner
def _ways_of(keys, key):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(keys) - 1))


@jit_inner
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
        self._clock = _remember(*held, before, last, tokens, probs)


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
    _top_rows(bits, which, counts, tokens, probs)
    return tokens, probs

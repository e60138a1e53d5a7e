"""Compiled functions that read and write the arrays of a pool.

A pool consists of three arrays, which `store.Contents` owns and enlarges:

* `log`: the tokens in the order of their arrival, a negative one between two texts. In a full log
  the newest token overwrites the oldest.
* `links[p, k]`: how many tokens before place `p` its key k last occurred; 0: never. Keys and
  occurrences are those of `_numba`.
* `table`: a hash table in buckets. An entry is the newest occurrence of a key: its arrival time in
  the low bits, a tag (some bits of the key's hash) above them. Free ways come last in their bucket;
  a full bucket gives up its oldest entry.

A token is addressed by its *age*: the newest has age 1, the oldest age `live`. An entry or link
counts only if its age is at most `live` and the tokens there are the key. That detects what was
overwritten, and no file, whatever it holds, makes us read outside the log.

The table grows bucket by bucket (linear hashing, Litwin 1980), so no addition waits for a rehash.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool._numba import LONGEST_KEY, longer_key
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS
from lookahead_hf.ngram_pool.store import FEWEST_BUCKETS, ROOM_TO_GROW, WAYS

FREE = 0


@jit
def append(log, links, table, num_buckets, num_added, max_tokens, time_bits, token_ids):
    """Append tokens, for which the arrays have room; return the change in the number of borders.

    `table` has the buckets that are needed afterwards, of which `num_buckets` are in use.
    """
    context = np.empty(LONGEST_KEY, np.int32)
    more_borders = 0
    for token in token_ids:
        head, live = num_added % max_tokens, min(num_added, max_tokens)
        now = time_of(num_added, time_bits)
        if live == max_tokens:
            more_borders -= log[head] <= BORDER
            _forget(table, num_added % num_buckets, live, now, time_bits)
        elif num_buckets < min(len(table), ROOM_TO_GROW * (live + 1) // WAYS):
            _split(log, table, num_buckets, head, live, now, time_bits, context)
            num_buckets += 1
        known = 0
        if token > BORDER:
            known = _gather(log, head, live, context)
        else:
            more_borders += 1
        key = np.uint64(0)
        for k in range(NUM_KEYS):
            age = np.int64(0)
            if known >= 1 << k:
                key = longer_key(key, context, k)
                bucket, way, age = newest_occurrence(
                    log, table, num_buckets, head, live, now, time_bits, context, k, key
                )
                table[bucket, way] = tag_of(key, time_bits) << time_bits | now
            links[head, k] = age
        log[head] = token
        num_added += 1
    return more_borders


@jit_inner
def newest_occurrence(log, table, num_buckets, head, live, now, time_bits, context, k, key):
    """Return the bucket and way of a key's entry and the age of its newest occurrence, 0 for none.

    The context is newest first, and `key` is the hash of its last `2**k` tokens. The way of an
    unknown key is the one that its entry would take: a free one, or that of the oldest entry.
    """
    bucket, tag = bucket_of_key(key, num_buckets), tag_of(key, time_bits)
    oldest, greatest_age = 0, np.int64(0)
    for way in range(WAYS):
        entry = table[bucket, way]
        if entry == FREE:
            return bucket, way, np.int64(0)
        age = age_of(entry, now, time_bits)
        if (
            entry >> time_bits == tag
            and match_length(log, head, live, age, context, 1 << k) == 1 << k
        ):
            return bucket, way, age
        if age > greatest_age:
            oldest, greatest_age = way, age
    return bucket, oldest, np.int64(0)


@jit_inner
def match_length(log, head, live, age, context, most):
    """Return the match length before the token of that age, at most `most`."""
    most = min(most, live - age)
    equal = 0
    while equal < most and log[place_of(log, head, age + 1 + equal)] == context[equal]:
        equal += 1
    return equal


@jit_inner
def place_of(log, head, age):
    """Return the place of the token of that age, which is at most `live`."""
    place = head - age
    return place if place >= 0 else place + len(log)


@jit_inner
def time_of(num_added, time_bits):
    """Return the arrival time of the token that follows `num_added` others, never 0."""
    return 1 + num_added % ((1 << time_bits) - 1)


@jit_inner
def age_of(entry, now, time_bits):
    """Return the age of an entry's token, 1 or more; the next token would arrive at `now`."""
    period = (np.int64(1) << time_bits) - 1
    age = now - (np.int64(entry) & period)
    return age if age > 0 else age + period


@jit_inner
def bucket_of_key(key, num_buckets):
    """Return the bucket of a key: the bits of its hash that number the buckets, or one bit less."""
    mask = num_buckets - 1
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    bucket = np.int64(key >> np.uint64(32)) & mask
    return bucket if bucket < num_buckets else bucket & (mask >> 1)


@jit_inner
def tag_of(key, time_bits):
    """Return the bits of the key's hash that an entry keeps."""
    return np.int64(key & np.uint64(0xFFFFFFFF)) >> time_bits


@jit_inner
def _forget(table, bucket, live, now, time_bits):
    """Free the entries of keys that have left the log, long before their arrival times recur."""
    kept = 0
    for way in range(WAYS):
        entry = table[bucket, way]
        if entry != FREE and age_of(entry, now, time_bits) < live:
            table[bucket, kept] = entry
            kept += 1
    table[bucket, kept:] = FREE


@jit_inner
def _split(log, table, new, head, live, now, time_bits, context):
    """Start the next bucket with those entries of an older bucket that now belong to it."""
    highest_bit = FEWEST_BUCKETS
    while 2 * highest_bit <= new:
        highest_bit *= 2
    old, kept, moved = new - highest_bit, 0, 0
    for way in range(WAYS):
        entry = table[old, way]
        if entry != FREE:
            key = _key_of_entry(log, head, live, now, time_bits, entry, old, new, context)
            if bucket_of_key(key, new + 1) == new:
                table[new, moved] = entry
                moved += 1
            else:
                table[old, kept] = entry
                kept += 1
    table[old, kept:] = FREE
    table[new, moved:] = FREE


@jit_inner
def _key_of_entry(log, head, live, now, time_bits, entry, bucket, num_buckets, context):
    """Return the hash of an entry's key, 0 if the log no longer holds it."""
    key = np.uint64(0)
    age = age_of(entry, now, time_bits)
    if age < live:
        known = _gather(log, place_of(log, head, age), live - age, context)
        for k in range(NUM_KEYS):
            if known < 1 << k:
                break
            key = longer_key(key, context, k)
            if (
                tag_of(key, time_bits) == entry >> time_bits
                and bucket_of_key(key, num_buckets) == bucket
            ):
                return key
    return np.uint64(0)


@jit_inner
def _gather(log, place, known, context):
    """Fill `context`, newest first, with the `known` tokens before `place`; return their number."""
    for i in range(min(known, len(context))):
        context[i] = log[place_of(log, place, i + 1)]
        if context[i] <= BORDER:
            return i
    return min(known, len(context))

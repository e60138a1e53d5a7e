"""Compiled loops of pools: the table of n-grams, and how it grows."""

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool._numba import (
    BUCKET,
    COUNT,
    DEPTH,
    LEVEL,
    LEVEL_OF,
    LONGEST_KEY,
    MOST_VISITS,
    NUM_FIELDS,
    NUM_LEVELS,
    PARENT,
    TOKEN,
    VISITS,
    longer_key,
    rank,
    set_buckets,
)
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS
from lookahead_hf.ngram_pool.store import FEWEST_BUCKETS, ROOM_TO_GROW, WAYS

__all__ = ["append", "grow"]


# mypy: disable-error-code="no-untyped-def"


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


# mypy: disable-error-code="no-untyped-def"


# Columns of `ranked` and `children` after those of a node: the occurrences of its path in `found`.
FIRST, LAST = NUM_FIELDS, NUM_FIELDS + 1
NUM_COLUMNS = NUM_FIELDS + 2
# Rows of `found`: age of the next token, length of the match before it, the token itself.
AGE, LENGTH, NEXT = range(3)


@jit
def grow(
    log, links, table, num_added, max_tokens, time_bits,
    vocab_size, context, limits, rates, min_score, scores, nodes,
):  # fmt: skip
    """Fill `scores` [max_nodes] and `nodes` [4, max_nodes], best first; return their number.

    The occurrences of a node's path are adjacent in `found`; growing the node sorts them by the
    token that comes next.
    """
    min_ngram, max_ngram = limits
    head, live = num_added % max_tokens, min(num_added, max_tokens)
    now = time_of(num_added, time_bits)
    found = np.empty((3, MOST_VISITS), np.int64)
    last = _look_up(log, links, table, head, live, now, time_bits, context, min_ngram, found)
    children = np.empty((MOST_VISITS, NUM_COLUMNS), np.int32)
    ranked = np.empty((len(scores), NUM_COLUMNS), np.int32)
    order = np.empty(len(scores), np.int32)
    node, depth, first, score, num_ranked = -1, 0, 0, 1.0, 0
    while node + 1 < len(scores):
        last = _read_next(log, head, vocab_size, found, first, last)
        num_children = _sort_children(found, first, last, max_ngram, children)
        for i in range(num_children):
            reach = score * rates[children[i, BUCKET]]
            if reach >= min_score:
                children[i, PARENT], children[i, DEPTH] = node, depth + 1
                num_ranked = rank(ranked, order, scores, node + 1, num_ranked, children[i], reach)
        node += 1
        if node == num_ranked:
            return node
        best = ranked[order[node]]
        for field in range(len(nodes)):
            nodes[field, node] = best[field]
        depth, first, last, score = best[DEPTH], best[FIRST], best[LAST], scores[node]
    return len(scores)


@jit_inner
def _look_up(log, links, table, head, live, now, time_bits, context, min_ngram, found):
    """Fill `found` with the newest occurrences of the context's suffixes; return their number.

    Those of the longest key come first; a shorter key does not repeat them.
    """
    ages = np.zeros((NUM_KEYS, VISITS[0]), np.int64)
    key, longest = np.uint64(0), -1
    for k in range(NUM_KEYS):
        if len(context) < 1 << k:
            break
        key = longer_key(key, context, k)
        _, _, ages[k, 0] = newest_occurrence(
            log, table, len(table), head, live, now, time_bits, context, k, key
        )
        if ages[k, 0] == 0:
            break
        longest = k
    _follow_links(log, links, head, live, longest, ages, found)
    num_found = 0
    for k in range(longest, -1, -1):
        most = len(context) if k == longest else 2 << k
        for visit in range(VISITS[k]):
            match_len = match_length(log, head, live, ages[k, visit], context, most)
            if ages[k, visit] == 0 or match_len < 1 << k:
                break
            if match_len >= min_ngram and (match_len < most or k == longest):
                found[AGE, num_found], found[LENGTH, num_found] = ages[k, visit], match_len
                num_found += 1
    return num_found


@jit_inner
def _follow_links(log, links, head, live, longest, ages, found):
    """Fill `ages` [keys, visits] with the older occurrences of each key, 0 after the last.

    This loads links and tokens without comparing any, so that the reads of all keys wait for the
    memory at the same time.
    """
    for visit in range(1, VISITS[0]):
        for k in range(longest + 1):
            age = ages[k, visit - 1]
            if age > 0 and visit < VISITS[k]:
                place = place_of(log, head, age)
                found[NEXT, visit] = log[place]
                age += np.int64(links[place, k])
                if ages[k, visit - 1] < age <= live:
                    ages[k, visit] = age


@jit_inner
def _read_next(log, head, vocab_size, found, first, last):
    """Read the next token of each occurrence, and drop those that end; return the new `last`."""
    kept = first
    for i in range(first, last):
        if found[AGE, i] > 0:
            token = log[place_of(log, head, found[AGE, i])]
            if BORDER < token < vocab_size:
                found[AGE, kept], found[LENGTH, kept] = found[AGE, i], found[LENGTH, i]
                found[NEXT, kept] = token
                kept += 1
    return kept


@jit_inner
def _sort_children(found, first, last, max_ngram, children):
    """Sort occurrences by their next token and advance past it; return the number of tokens."""
    occurrences = np.zeros(NUM_LEVELS, np.int32)
    num_children = 0
    while first < last:
        end = _group(found, first, last)
        child = children[num_children]
        child[TOKEN], child[FIRST], child[LAST] = found[NEXT, first], first, end
        child[LEVEL] = child[COUNT] = -1
        for i in range(first, end):
            match_len = found[LENGTH, i]
            level = LEVEL_OF[match_len]
            occurrences[level] += 1
            if level > child[LEVEL]:
                child[LEVEL], child[COUNT] = level, 0
            child[COUNT] += level == child[LEVEL]
            found[AGE, i] -= 1
            found[LENGTH, i] = min(match_len + 1, max_ngram)
        num_children += 1
        first = end
    set_buckets(children, num_children, occurrences)
    return num_children


@jit_inner
def _group(found, first, last):
    """Move the occurrences with the first one's next token next to it; return their end."""
    end = first + 1
    for i in range(first + 1, last):
        if found[NEXT, i] == found[NEXT, first]:
            for row in range(3):
                moved = found[row, i]
                for place in range(i, end, -1):
                    found[row, place] = found[row, place - 1]
                found[row, end] = moved
            end += 1
    return end

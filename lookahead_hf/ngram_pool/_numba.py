"""Compiled functions of the suffix index; `tests/oracles/suffix_index.py` does the same in Python.

An index consists of three arrays, which `suffix_index` owns and enlarges:

* `text`: the tokens; a negative id is a border between two texts.
* `links[p, k]`: the occurrence before `p` of key k, the `2**k` tokens before `p`.
* `heads`: a hash table from a context to its newest occurrence; an entry is `place * 4 + k`.

An *occurrence* of a context is the place of the token that follows it. Only contexts of 1, 2, 4
and 8 tokens are keys; for lengths in between and above, the tokens before their occurrences are
compared. So an insertion writes four entries, and a look-up visits at most 60 occurrences.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool import matches
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS, NUM_SHARES, NUM_TOTALS

FREE = -1
LONGEST_KEY = 1 << (NUM_KEYS - 1)
NUM_LEVELS = len(matches.LEVELS)
MOST_VISITS = sum(matches.VISITS)

# Arrays, because numba reads constant arrays in place but copies a tuple at every access.
VISITS = np.array(matches.VISITS)
# Class of each match length, and the key that finds the matches of each class.
LEVEL_OF = np.array([matches.level_of(n) for n in range(matches.LONGEST_MATCH + 1)])
KEY_OF_LEVEL = np.array([min(n, LONGEST_KEY).bit_length() - 1 for n in matches.LEVELS])

# Columns of `nodes` and of `found`.
TOKEN, PARENT, DEPTH, BUCKET, LEVEL, COUNT = range(6)
NUM_FIELDS = 6


@jit_inner
def insert(text, links, heads, place, token_id, context):
    """Write a token to its place, which ends the text; return the number of new entries.

    `context`, [LONGEST_KEY] int32, is scratch.
    """
    text[place] = token_id
    links[place, :] = FREE
    if token_id <= BORDER:
        return 0
    known = gather(text, place, context)
    key = np.uint64(0)
    num_new = 0
    for k in range(NUM_KEYS):
        if known < 1 << k:
            break
        key = _longer_key(key, context, k)
        slot = _find(text, heads, context, k, key)
        if heads[slot] == FREE:
            num_new += 1
        else:
            links[place, k] = heads[slot] >> 2
        heads[slot] = place << 2 | k
    return num_new


@jit
def rehash(text, heads, larger):
    """Copy every entry of `heads` to the empty table `larger`."""
    context = np.empty(LONGEST_KEY, np.int32)
    for entry in heads:
        if entry == FREE:
            continue
        gather(text, entry >> 2, context)
        key = np.uint64(0)
        for k in range((entry & 3) + 1):
            key = _longer_key(key, context, k)
        slot = _first_slot(key, len(larger))
        while larger[slot] != FREE:
            slot = (slot + 1) % len(larger)
        larger[slot] = entry


@jit_inner
def grow(text, links, heads, start, limits, rates, min_score, nodes, scores):
    """Fill `nodes` [max_nodes, 6] and `scores` [max_nodes], best first; return their number.

    The tree follows `start`, a text's last tokens, newest first. `scores` and `order` hold the
    nodes so far and, after them, the best candidates by score: the first candidate becomes the next
    node.
    """
    min_ngram, max_ngram = limits
    max_nodes, known = len(scores), len(start)
    buffer = np.empty(max_nodes + known, np.int32)
    for i in range(known):
        buffer[max_nodes + i] = start[i]
    found = np.empty((MOST_VISITS, NUM_FIELDS), np.int32)
    ranked, order = np.empty((max_nodes, NUM_FIELDS), np.int32), np.empty(max_nodes, np.int32)
    scratch = np.empty(NUM_KEYS, np.int64), np.empty(NUM_LEVELS, np.int32), found
    best_rates = _best_rate_of_keys(rates)
    node, depth, score, num_ranked = -1, 0, 1.0, 0
    while node + 1 < max_nodes:
        shortest = _shortest_key(best_rates, score, min_score, scores, num_ranked)
        if shortest < NUM_KEYS:
            context = buffer[max_nodes - depth :][: min(depth + known, max_ngram)]
            _write_path(nodes, node, context[:depth])
            num_found = _look_up(text, links, heads, context, min_ngram, shortest, scratch)
            for i in range(num_found):
                reach = score * rates[found[i, BUCKET]]
                if reach >= min_score:
                    found[i, PARENT] = node
                    found[i, DEPTH] = depth + 1
                    num_ranked = _rank(ranked, order, scores, node + 1, num_ranked, found[i], reach)
        node += 1
        if node == num_ranked:
            return node
        best = ranked[order[node]]
        for field in range(NUM_FIELDS):  # numba compiles an assignment of slices for seconds
            nodes[node, field] = best[field]
        depth, score = nodes[node, DEPTH], scores[node]
    return max_nodes


@jit_inner
def gather(text, place, context):
    """Fill `context`, newest first, with the tokens before `place`; return their number."""
    known = 0
    while known < len(context) and place > known and text[place - 1 - known] > BORDER:
        context[known] = text[place - 1 - known]
        known += 1
    return known


@jit_inner
def _write_path(nodes, node, context):
    """Fill `context`, newest first, with the newest tokens of a node's path."""
    for i in range(len(context)):
        context[i] = nodes[node, TOKEN]
        node = nodes[node, PARENT]


@jit_inner
def _longer_key(key, context, k):
    """Return the hash of the context's last `2**k` tokens, from that of the next shorter key."""
    for i in range((1 << k) >> 1, 1 << k):
        key = (key ^ np.uint64(context[i] + 1)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(32)
    return key


@jit_inner
def _first_slot(key, num_slots):
    return np.int64(((key >> np.uint64(32)) * np.uint64(num_slots)) >> np.uint64(32))


@jit_inner
def _find(text, heads, context, k, key):
    """Return the slot of the context's last `2**k` tokens: that of their entry, or a free one."""
    slot = _first_slot(key, len(heads))
    while True:
        entry = heads[slot]
        if entry == FREE:
            return slot
        place = entry >> 2
        if entry & 3 == k and _match_len(text, place, context, 0, min(place, 1 << k)) == 1 << k:
            return slot
        slot += 1
        if slot == len(heads):
            slot = 0


@jit_inner
def _match_len(text, place, context, equal, most):
    """Return the match length before `place`, at most `most`, of which `equal` is known."""
    while equal < most and text[place - 1 - equal] == context[equal]:
        equal += 1
    return equal


@jit_inner
def _look_up(text, links, heads, context, min_ngram, shortest, scratch):
    """Fill `found` with the tokens that followed the context; return their number.

    Occurrences are visited from the longest key down to `shortest`, except those that a longer key
    finds too.
    """
    newest, occurrences, found = scratch
    occurrences[:] = 0
    longest = _newest_places(text, heads, context, newest)
    num_found = 0
    for k in range(longest, shortest - 1, -1):
        most = len(context) if k == longest else 2 << k
        place = newest[k]
        for _ in range(VISITS[k]):
            match_len = _match_len(text, place, context, 1 << k, min(place, most))
            is_longest = match_len < most or k == longest
            if match_len >= min_ngram and is_longest and text[place] > BORDER:
                level = LEVEL_OF[match_len]
                occurrences[level] += 1
                num_found = _note(found, num_found, text[place], level)
            place = links[place, k]
            if place == FREE:
                break
    _set_buckets(found, num_found, occurrences)
    return num_found


@jit_inner
def _set_buckets(found, num_found, occurrences):
    """Set the bucket of each token, from its COUNT of the `occurrences` of its LEVEL or more."""
    for level in range(NUM_LEVELS - 1, 0, -1):
        occurrences[level - 1] += occurrences[level]
    for i in range(num_found):
        level = found[i, LEVEL]
        total = occurrences[level]
        share = (NUM_SHARES * found[i, COUNT] + total - 1) // total - 1
        found[i, BUCKET] = (level * NUM_SHARES + share) * NUM_TOTALS + min(NUM_TOTALS, total) - 1


@jit_inner
def _newest_places(text, heads, context, newest):
    """Fill `newest[k]` with each key's newest occurrence; return the longest `k`, or -1."""
    key = np.uint64(0)
    for k in range(NUM_KEYS):
        if len(context) < 1 << k:
            return k - 1
        key = _longer_key(key, context, k)
        entry = heads[_find(text, heads, context, k, key)]
        if entry == FREE:
            return k - 1
        newest[k] = entry >> 2
    return NUM_KEYS - 1


@jit_inner
def _note(found, num_found, token, level):
    """Count an occurrence for the token after it, unless a longer match decides about it."""
    for i in range(num_found):
        if found[i, TOKEN] == token:
            if level > found[i, LEVEL]:
                found[i, LEVEL], found[i, COUNT] = level, 1
            elif level == found[i, LEVEL]:
                found[i, COUNT] += 1
            return num_found
    row = found[num_found]
    row[TOKEN], row[LEVEL], row[COUNT] = token, level, 1
    return num_found + 1


@jit_inner
def _best_rate_of_keys(rates):
    """Return the highest rate among the matches that each key finds, [keys]."""
    best = np.zeros(NUM_KEYS)
    for bucket in range(len(rates)):
        k = KEY_OF_LEVEL[bucket // (NUM_SHARES * NUM_TOTALS)]
        best[k] = max(best[k], rates[bucket])
    return best


@jit_inner
def _shortest_key(best_rates, score, min_score, scores, num_ranked):
    """Return the first key that may find a child good enough for the tree, or `NUM_KEYS`."""
    for k in range(NUM_KEYS):
        reach = score * best_rates[k]
        if reach >= min_score and (num_ranked < len(scores) or reach > scores[-1]):
            return k
    return NUM_KEYS


@jit_inner
def _rank(ranked, order, scores, first, num_ranked, candidate, score):
    """Sort a candidate into `order[first:num_ranked]`; if that is full, the last one drops out.

    `ranked[order[i]]` is the candidate with the score `scores[i]`. Returns the new `num_ranked`.
    """
    place = row = num_ranked
    if place == len(order):
        place -= 1
        if scores[place] >= score:
            return num_ranked
        row = order[place]
    while place > first and scores[place - 1] < score:
        scores[place] = scores[place - 1]
        order[place] = order[place - 1]
        place -= 1
    scores[place] = score
    order[place] = row
    for i in range(len(candidate)):
        ranked[row, i] = candidate[i]
    return min(num_ranked + 1, len(order))

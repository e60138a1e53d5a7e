"""Compiled functions of the suffix index; `tests/oracles/suffix_index.py` does the same in Python.

An index consists of three arrays, which `suffix_index` owns and enlarges:

* `text`: the tokens; a negative id is a border between two texts.
* `links[p, k]`: the occurrence before `p` of key k, the `2**k` tokens before `p`.
* `heads`: a hash table from a context to its newest occurrence; an entry is `place * 4 + k`.

An *occurrence* of a context is the place of the token that follows it. Only contexts of 1, 2, 4
and 8 tokens are keys; for lengths in between and above, the tokens before their occurrences are
compared. So an insertion writes four entries, and a look-up visits at most 60 occurrences.

A call serves the indexes of many rows. A row of int64, the *state*, describes an index: the
addresses and sizes of its arrays, and how far they are filled.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_hf.ngram_pool import matches
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.matches import BORDER, LONGEST_MATCH, NUM_KEYS, NUM_SHARES, NUM_TOTALS

FREE = -1
LONGEST_KEY = 1 << (NUM_KEYS - 1)
NUM_LEVELS = len(matches.LEVELS)
MOST_VISITS = sum(matches.VISITS)

# Arrays, because numba reads constant arrays in place but copies a tuple at every access.
VISITS = np.array(matches.VISITS)
# Class of each match length, and the key that finds the matches of each class.
LEVEL_OF = np.array([matches.level_of(n) for n in range(LONGEST_MATCH + 1)])
KEY_OF_LEVEL = np.array([min(n, LONGEST_KEY).bit_length() - 1 for n in matches.LEVELS])

# Columns of `nodes` and of `found`.
TOKEN, PARENT, DEPTH, BUCKET, LEVEL, COUNT = range(6)
NUM_FIELDS = 6


@jit_inner
def insert(text, links, heads, place, token_id, context):
    """Write a token to its place, which ends the text; return the number of new entries."""
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
def grow(text, links, heads, start, rates, min_score, nodes, scores):
    """Fill `nodes` [max_nodes, 6] and `scores` [max_nodes], best first; return their number.

    The tree follows `start`, a text's last tokens, newest first. `scores` and `order` hold the
    nodes so far and, after them, the best candidates by score: the first candidate becomes the next
    node.
    """
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
            context = buffer[max_nodes - depth :][: min(depth + known, LONGEST_MATCH)]
            _write_path(nodes, node, context[:depth])
            num_found = _look_up(text, links, heads, context, shortest, scratch)
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
def _look_up(text, links, heads, context, shortest, scratch):
    """Fill `found` with the tokens that followed the context; return their number.

    Occurrences are visited from the longest key down to `shortest`, none of them twice.
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
            if is_longest and text[place] > BORDER:
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


# Columns of the states: addresses, sizes of `text` and `heads`, tokens and entries so far.
TEXT, LINKS, HEADS, TEXT_ROOM, NUM_HEADS, LENGTH, NUM_ENTRIES = range(7)
NUM_COLUMNS = 7

FILL = 0.75  # How full a hash table may be


@intrinsic
def _pointer(_, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@jit_inner
def _arrays(state):
    room = state[TEXT_ROOM]
    text = carray(_pointer(state[TEXT]), (room,), np.int32)
    links = carray(_pointer(state[LINKS]), (room, NUM_KEYS), np.int32)
    return text, links, carray(_pointer(state[HEADS]), (state[NUM_HEADS],), np.int32)


@jit
def insert_rows(states, offsets, token_ids, done):
    """Append to each row's index its tokens from `done` on; return whether all had room.

    `states` are [rows, 7] int64; `offsets`, [rows + 1], say which tokens each row has; `done`,
    [rows], is counted up.
    """
    context = np.empty(LONGEST_KEY, np.int32)
    is_complete = True
    for row in range(len(states)):
        state = states[row]
        first, last = offsets[row] + done[row], offsets[row + 1]
        if first == last:
            continue
        text, links, heads = _arrays(state)
        most_entries = int(FILL * len(heads))
        for at in range(first, last):
            length = state[LENGTH]
            if length == len(text) or state[NUM_ENTRIES] + NUM_KEYS > most_entries:
                is_complete = False
                break
            token = np.int32(token_ids[at])
            state[NUM_ENTRIES] += insert(text, links, heads, length, token, context)
            state[LENGTH] = length + 1
            done[row] += 1
    return is_complete


@jit
def last_tokens(states, live, most):
    """Return the last tokens of each live row's text, newest first, and their number.

    They are [rows, most] int32 and [rows] int64; rows that are not live have none.
    """
    tokens = np.empty((len(states), most), np.int32)
    known = np.zeros(len(states), np.int64)
    for row in range(len(states)):
        if live[row]:
            text, _, _ = _arrays(states[row])
            known[row] = gather(text, states[row, LENGTH], tokens[row])
    return tokens, known


@jit
def grow_rows(states, starts, known, rates, min_score, max_nodes):
    """Grow a tree per row after its start; return the fields of a `DraftTree` and the buckets.

    `starts` and `known` are as `last_tokens` returns them; nothing follows an empty start.
    """
    num_rows = len(states)
    offsets = np.zeros(num_rows + 1, np.int64)
    tokens = np.empty(num_rows * max_nodes, np.int64)
    fields = np.empty((3, num_rows * max_nodes), np.int32)
    out_score = np.empty(num_rows * max_nodes, np.float32)
    nodes, scores = np.empty((max_nodes, NUM_FIELDS), np.int32), np.empty(max_nodes)
    for row in range(num_rows):
        first = offsets[row]
        text, links, heads = _arrays(states[row])
        start = starts[row, : known[row]]
        count = grow(text, links, heads, start, rates, min_score, nodes, scores)
        for node in range(count):
            tokens[first + node] = nodes[node, TOKEN]
            fields[0, first + node] = nodes[node, PARENT]
            fields[1, first + node] = nodes[node, DEPTH]
            fields[2, first + node] = nodes[node, BUCKET]
            out_score[first + node] = scores[node]
        offsets[row + 1] = first + count
    end = offsets[num_rows]
    return (
        offsets, tokens[:end], fields[0, :end], fields[1, :end], out_score[:end], fields[2, :end]
    )  # fmt: skip

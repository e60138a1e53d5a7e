"""Compiled growth of a pool's tree; `tests/oracles/pool.py` does the same in plain Python.

The occurrences of the context are read onwards, token by token, while the suffix index looks every
node up again. That finds 2 to 3 % fewer of the tokens, but memory of this size is slow: it visits
60 places, not 60 for every node.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.ngram_pool._numba import (
    BUCKET,
    COUNT,
    DEPTH,
    LEVEL,
    LEVEL_OF,
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
from lookahead_hf.ngram_pool._pool_table import (
    append,
    match_length,
    newest_occurrence,
    place_of,
    time_of,
)
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.matches import BORDER, NUM_KEYS

__all__ = ["append", "grow"]

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

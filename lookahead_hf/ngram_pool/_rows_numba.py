"""Compiled functions that serve the suffix indexes of many rows in one call.

A row of int64, the *state*, describes an index: the addresses and sizes of its arrays, and how far
they are filled. `suffix_index` keeps the arrays alive and the states up to date.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead_hf.ngram_pool._numba import (
    BUCKET,
    DEPTH,
    LONGEST_KEY,
    NUM_FIELDS,
    PARENT,
    TOKEN,
    gather,
    grow,
    insert,
    rehash,
)
from lookahead_hf.ngram_pool.jit import jit, jit_inner
from lookahead_hf.ngram_pool.matches import NUM_KEYS

__all__ = ["grow_rows", "insert_rows", "last_tokens", "rehash"]

# Columns of the states: addresses, sizes of `text` and `heads`, tokens and entries so far.
TEXT, LINKS, HEADS, TEXT_ROOM, NUM_HEADS, LENGTH, NUM_ENTRIES = range(7)
NUM_COLUMNS = 7

FILL = 0.75
"""How full a hash table may be."""


@intrinsic
def _pointer(_, address):
    """Return an address as the pointer that `carray` takes."""

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

    `states` are [rows, 7] int64, `offsets` those of the rows' tokens, [rows + 1]; `done`, [rows],
    is counted up.
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
def grow_rows(states, starts, known, limits, rates, min_score, max_nodes):
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
        count = grow(text, links, heads, start, limits, rates, min_score, nodes, scores)
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

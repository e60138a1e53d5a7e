"""The layout of programs for the kernels, which are int64 numbers.

A program is a list of operations that all threads carry out one after the other. Addresses are
those of tensors, or 0. A float32 number is held as its bits.
"""

from __future__ import annotations

import numpy as np

# A job: what its operations share.
(
    TOKENS,
    FIRST_OP,
    NUM_OPS,
    COUNTERS,  # of each phase: what is finished, and what is taken of each thread's range
    TICKETS,
    SCRATCH,
    SCRATCH_SIZE,
    THREADS,
    TILE_ROOM,  # bytes for tiles in front of a thread's scratch memory
    JOB_FIELDS,
) = range(10)

# An operation. KIND decides which of the other fields count.
(
    KIND,
    JOINS_NEXT,  # whether the next operation may run at the same time
    SOURCE,  # what it reads, [tokens, ...]
    TARGET,  # what it writes, [tokens, ...]
    WEIGHT,
    BIAS,
    WEIGHT_2,  # of the unit that a gate opens; of ATTEND the values
    BIAS_2,
    SIZE,  # numbers of a vector that it reads
    OUTPUTS,  # numbers of a vector that it writes
    MODE,
    FLAVOUR,  # which norm, or which activation
    FACTOR,  # of what is added; of ATTEND that of the scores
    EPSILON,  # of a norm; of ATTEND the limit of the scores, 0 for none
    HEADS,  # vectors of a token
    SHARED,  # heads of K and V
    ROTATED,  # numbers of a head that are rotated
    COS,
    SIN,
    PLAN,  # where tokens are in the cache, and what they see
    PIECE,  # outputs of a piece
    PACKED,  # whether LINEAR reads what an operation wrote in the mode PACK
    OP_FIELDS,
) = range(23)

NORM, LINEAR, GATED, ROTATE, ATTEND = range(5)  # Kinds of operations

STORE, ADD, TO_SLOTS, PACK = range(4)
"""Modes: write the target, add to it, write the rows of a cache that the plan names, or write what
the next product reads: packed by tiles, in pieces of whole steps; as STORE does by vectors."""

RMS, RMS_WEIGHTED_WIDE, RMS_FROM_ONE, LAYER_NORM = range(4)
"""Norms: Llama's; OLMo's, which multiplies before it rounds; Gemma's, whose weight counts from one;
and the one that also takes the mean away."""

NO_ACTIVATION, SILU, GELU_TANH = range(3)  # Activations

# A plan: what the layers that take the same mask share.
(
    SLOTS,  # where each token's K and V belong, [tokens] into [rows * capacity]
    SEGMENTS,
    NUM_SEGMENTS,
    TAIL_STARTS,  # where the tail of each token begins and ends, [tokens + 1]
    TAILS,  # slots within a row that tokens see one by one, all tails after another
    PITCH,  # room for the scores of a token
    PLAN_FIELDS,
) = range(7)

# A segment: tokens of a row that see the same slots, but for their tails.
FIRST, COUNT, ROW_SLOT, BEGIN, END, SEGMENT_FIELDS = range(6)

SIDE_BY_SIDE = 6
"""Most tokens that a row of a weight is multiplied by at a time: as many sums as stay in registers.
"""

TILE = 16  # Rows of a tile; tokens of a tile; pairs of numbers of a tile
COUNTER_STRIDE = 8  # int64 numbers between counters: a cache line each, against false sharing


def bits(number: float) -> int:
    """Return the bits of a float32 number."""
    return int(np.float32(number).view(np.uint32))

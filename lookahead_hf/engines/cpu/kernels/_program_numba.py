"""Programs: operations of decoder layers, carried out by a team of threads.

An operation is cut into pieces. Every thread takes the next piece until none is left, and waits
until the others have finished theirs. No piece belongs to a thread, so that a thread that comes
late, or never, costs only speed.

Weights are read where the model has them, so no copy can be out of date. Results of 16 bits are
rounded where transformers' layers round them; sums within a product or in attention are float32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import types

from lookahead_hf.engines.cpu.kernels._attention_numba import attend
from lookahead_hf.engines.cpu.kernels._elementwise_numba import activate, near, norm, rotate
from lookahead_hf.engines.cpu.kernels._products_numba import product
from lookahead_hf.engines.cpu.kernels.fields import (
    ADD,
    ATTEND,
    BIAS,
    BIAS_2,
    COS,
    COUNTER_STRIDE,
    COUNTERS,
    EPSILON,
    FACTOR,
    FIRST_OP,
    FLAVOUR,
    GATED,
    HEADS,
    JOINS_NEXT,
    KIND,
    LINEAR,
    MODE,
    NO_ACTIVATION,
    NORM,
    NUM_OPS,
    NUM_SEGMENTS,
    OP_FIELDS,
    OUTPUTS,
    PIECE,
    PLAN,
    ROTATED,
    SCRATCH,
    SCRATCH_SIZE,
    SIN,
    SIZE,
    SLOTS,
    SOURCE,
    TARGET,
    TICKETS,
    TO_SLOTS,
    TOKENS,
    WEIGHT,
    WEIGHT_2,
)
from lookahead_hf.engines.cpu.kernels.scalars import (
    float_of,
    longs,
    look,
    narrow,
    numbers,
    take,
    wide,
    width_of,
    yield_core,
)
from lookahead_hf.ngram_pool.jit import entry_point, jit_inner_numbers

_PATIENCE = 2_000
"""Looks at a counter after which a waiting thread yields its core."""

_SINGLE, _NOTHING = np.float32(0.0), np.float32(0.0)
_ONE = np.float32(1.0)


@jit_inner_numbers
def _normalize(op, token, scratch, kind):
    """Carry out a norm for one token."""
    size, epsilon, flavour = op[SIZE], float_of(op[EPSILON]), op[FLAVOUR]
    length, adds = size * width_of(kind), op[MODE] == ADD
    for head in range(op[HEADS]):
        at = (token * op[HEADS] + head) * length
        source, target = op[SOURCE] + at, op[TARGET] + at
        normed = scratch + size * 4 if adds else target
        norm(source, normed, op[WEIGHT], op[BIAS], size, epsilon, flavour, kind, scratch)
        if adds:
            to, new = numbers(target, kind), numbers(normed, kind)
            for i in range(size):
                to[i] = narrow(wide(to[i]) + wide(new[i]), kind)


@jit_inner_numbers
def _turn(op, token, scratch, kind):
    """Rotate the heads of a token, after a norm of each if there is one."""
    dim, heads, is_wide = op[SIZE], op[HEADS], op[FLAVOUR] != 0
    epsilon, length = float_of(op[EPSILON]), op[SIZE] * width_of(kind)
    angle = token * op[ROTATED] * (4 if is_wide else width_of(kind))
    cos = op[COS] + angle if op[COS] else 0
    row = longs(longs(op[PLAN])[SLOTS])[token] if op[MODE] == TO_SLOTS else token
    for head in range(heads):
        source = op[SOURCE] + (token * heads + head) * length
        target = op[TARGET] + (row * heads + head) * length
        if op[WEIGHT]:
            norm(source, source, op[WEIGHT], 0, dim, epsilon, op[OUTPUTS], kind, scratch)
        rotate(source, target, cos, op[SIN] + angle, dim, op[ROTATED], is_wide, kind)


@jit_inner_numbers
def _multiply(op, tokens, piece, scratch, kind):
    """Multiply a piece of a linear layer's weight, and store the results or add them."""
    pitch, stride = op[PIECE], op[OUTPUTS]
    first = piece * pitch
    count, width = min(pitch, stride - first), width_of(kind)
    size, last, room = op[SIZE], first + count, scratch + tokens * pitch * 4
    product(op[WEIGHT], first, last, size, op[SOURCE], tokens, scratch, pitch, room, kind)
    bias, flavour, factor = op[BIAS], op[FLAVOUR], float_of(op[FACTOR])
    slots = longs(longs(op[PLAN])[SLOTS]) if op[MODE] == TO_SLOTS else longs(0)
    for t in range(tokens):
        total = numbers(scratch + t * pitch * 4, _SINGLE)
        if bias:
            b = numbers(bias + first * width, kind)
            for i in range(count):
                total[i] += wide(b[i])
        if flavour != NO_ACTIVATION:
            activate(scratch + t * pitch * 4, count, flavour, kind)
        row = slots[t] if op[MODE] == TO_SLOTS else t
        to = numbers(op[TARGET] + (row * stride + first) * width, kind)
        if op[MODE] != ADD:
            for i in range(count):
                to[i] = narrow(total[i], kind)
        elif factor == _ONE:
            for i in range(count):
                to[i] = narrow(wide(to[i]) + near(total[i], kind), kind)
        else:
            for i in range(count):
                added = near(near(total[i], kind) * factor, kind)
                to[i] = narrow(wide(to[i]) + added, kind)


@jit_inner_numbers
def _gate(op, tokens, piece, scratch, kind):
    """Multiply a piece of both weights of a gated unit, and gate the one by the other."""
    pitch, size, stride = op[PIECE], op[SIZE], op[OUTPUTS]
    first = piece * pitch
    count, width, flavour = min(pitch, stride - first), width_of(kind), op[FLAVOUR]
    other, last = scratch + tokens * pitch * 4, first + count
    room = other + tokens * pitch * 4
    product(op[WEIGHT], first, last, size, op[SOURCE], tokens, scratch, pitch, room, kind)
    product(op[WEIGHT_2], first, last, size, op[SOURCE], tokens, other, pitch, room, kind)
    for t in range(tokens):
        a = numbers(scratch + t * pitch * 4, _SINGLE)
        b = numbers(other + t * pitch * 4, _SINGLE)
        if op[BIAS]:
            c = numbers(op[BIAS] + first * width, kind)
            for i in range(count):
                a[i] += wide(c[i])
        if op[BIAS_2]:
            d = numbers(op[BIAS_2] + first * width, kind)
            for i in range(count):
                b[i] += wide(d[i])
        to = numbers(op[TARGET] + (t * stride + first) * width, kind)
        activate(scratch + t * pitch * 4, count, flavour, kind)
        for i in range(count):
            to[i] = narrow(a[i] * near(b[i], kind), kind)


@jit_inner_numbers
def _num_pieces(op, tokens):
    """Return the number of pieces of an operation."""
    kind = op[KIND]
    if kind in (LINEAR, GATED):
        return (op[OUTPUTS] + op[PIECE] - 1) // op[PIECE]
    if kind == ATTEND:
        return longs(op[PLAN])[NUM_SEGMENTS] * op[HEADS]
    return tokens


@jit_inner_numbers
def _carry_out(op, tokens, piece, scratch, kind):
    """Carry out a piece of an operation."""
    if op[KIND] == LINEAR:
        _multiply(op, tokens, piece, scratch, kind)
    elif op[KIND] == GATED:
        _gate(op, tokens, piece, scratch, kind)
    elif op[KIND] == ATTEND:
        attend(op, piece, scratch, kind)
    elif op[KIND] == NORM:
        _normalize(op, piece, scratch, kind)
    else:
        _turn(op, piece, scratch, kind)


@jit_inner_numbers
def _wait(address, count):
    """Wait until a counter that threads share reaches `count`."""
    looks = 0
    while look(address) < count:
        looks += 1
        if looks > _PATIENCE:
            yield_core()
            looks = 0


@jit_inner_numbers
def run(address, kind):
    """Do one thread's part of the job at an address, which all threads share."""
    job = longs(address)
    tokens, counter = job[TOKENS], job[COUNTERS]
    scratch = job[SCRATCH] + take(job[TICKETS]) * job[SCRATCH_SIZE]
    first = 0
    while first < job[NUM_OPS]:
        last, total = first, 0
        while True:  # operations that may run at the same time
            op = longs(job[FIRST_OP] + last * OP_FIELDS * 8)
            total += _num_pieces(op, tokens)
            if not op[JOINS_NEXT]:
                break
            last += 1
        while True:
            piece = take(counter)
            if piece >= total:
                break
            at, part = first, piece
            op = longs(job[FIRST_OP] + at * OP_FIELDS * 8)
            while part >= _num_pieces(op, tokens):
                part -= _num_pieces(op, tokens)
                at += 1
                op = longs(job[FIRST_OP] + at * OP_FIELDS * 8)
            _carry_out(op, tokens, part, scratch, kind)
            take(counter + COUNTER_STRIDE * 8)
        _wait(counter + COUNTER_STRIDE * 8, total)
        counter += 2 * COUNTER_STRIDE * 8
        first = last + 1


@entry_point(types.void(types.intp))
def run_bfloat16(address):
    """Run a job on bfloat16 numbers."""
    run(address, np.uint16(0))


@entry_point(types.void(types.intp))
def run_float16(address):
    """Run a job on float16 numbers."""
    run(address, np.int16(0))


@entry_point(types.void(types.intp))
def run_float32(address):
    """Run a job on float32 numbers."""
    run(address, np.float32(0.0))

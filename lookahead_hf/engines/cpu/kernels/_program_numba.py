"""Programs: operations of decoder layers, carried out by a team of threads.

An operation is cut into pieces. Every thread begins with a range of its own, since memory brings a
weight faster in order, takes what others have left of theirs, and waits until all is finished. A
thread that comes late, or never, thus costs only speed.

Products and attention are made by lanes of vectors (`lanes`) or by tiles (`tiles`). One of these
arguments is None in each program, and numba compiles nothing that asks for it.

Weights are read where the model has them, so no copy can be out of date. Results of 16 bits are
rounded where transformers' layers round them; sums within a product or in attention are float32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import types

from lookahead_hf.engines.cpu.kernels import fields as f
from lookahead_hf.engines.cpu.kernels._attention_numba import attend
from lookahead_hf.engines.cpu.kernels._elementwise_numba import (
    activate,
    add_all,
    narrow_all,
    norm,
    rotate,
)
from lookahead_hf.engines.cpu.kernels._tiles_numba import (
    ROOM,
    attend_by_tiles,
    columns_of,
    is_packed,
    multiply_by_tiles,
    pack,
)
from lookahead_hf.engines.cpu.kernels._vectors_numba import product
from lookahead_hf.engines.cpu.kernels.llvm import (
    float_of,
    longs,
    look,
    numbers,
    take,
    wide,
    width_of,
    yield_core,
)
from lookahead_hf.engines.cpu.kernels.tiles import configure, release_tiles
from lookahead_hf.ngram_pool.jit import EntryPoint, jit_inner_numbers

PRODUCTS = (f.LINEAR, f.GATED)
TOKEN_PIECES = 4  # Most per thread of what is done token by token: each costs two atomic additions
_PATIENCE = 2_000  # Looks at a counter after which a waiting thread yields its core

_SINGLE = np.float32(0.0)


@jit_inner_numbers
def _normalize(op, token, scratch, kind):
    size, epsilon, flavour = op[f.SIZE], float_of(op[f.EPSILON]), op[f.FLAVOUR]
    length, adds = size * width_of(kind), op[f.MODE] == f.ADD
    for head in range(op[f.HEADS]):
        at = (token * op[f.HEADS] + head) * length
        source, target = op[f.SOURCE] + at, op[f.TARGET] + at
        normed = scratch + size * 4 if adds else target
        norm(source, normed, op[f.WEIGHT], op[f.BIAS], size, epsilon, flavour, kind, scratch)
        if adds:
            to, new, total = numbers(target, kind), numbers(normed, kind), numbers(scratch, _SINGLE)
            for i in range(size):
                total[i] = wide(to[i]) + wide(new[i])
            narrow_all(scratch, size, target, kind)


@jit_inner_numbers
def _turn(op, token, scratch, kind):
    """Rotate the heads of a token, after a norm of each if there is one."""
    dim, heads, is_wide = op[f.SIZE], op[f.HEADS], op[f.FLAVOUR] != 0
    epsilon, length = float_of(op[f.EPSILON]), op[f.SIZE] * width_of(kind)
    angle = token * op[f.ROTATED] * (4 if is_wide else width_of(kind))
    row = longs(longs(op[f.PLAN])[f.SLOTS])[token] if op[f.MODE] == f.TO_SLOTS else token
    for head in range(heads):
        source = op[f.SOURCE] + (token * heads + head) * length
        target = op[f.TARGET] + (row * heads + head) * length
        if op[f.WEIGHT]:
            norm(source, source, op[f.WEIGHT], 0, dim, epsilon, op[f.OUTPUTS], kind, scratch)
        cos, sin, rotated = op[f.COS] + angle, op[f.SIN] + angle, op[f.ROTATED]
        rotate(source, target, cos, sin, dim, rotated, is_wide, kind)


@jit_inner_numbers
def _add_bias(sums, bias, first, count, kind):
    if bias:
        total, b = numbers(sums, _SINGLE), numbers(bias + first * width_of(kind), kind)
        for i in range(count):
            total[i] += wide(b[i])


@jit_inner_numbers
def _multiply(op, tokens, piece, scratch, kind):
    """Carry out a piece of a linear layer or of a gated unit."""
    pitch, size, stride, mode = op[f.PIECE], op[f.SIZE], op[f.OUTPUTS], op[f.MODE]
    first, width, is_gated = piece * pitch, width_of(kind), op[f.KIND] == f.GATED
    count, by_token = min(pitch, stride - first), pitch * 4
    last, gated = first + count, scratch + tokens * by_token if is_gated else 0
    x, rest = op[f.SOURCE], scratch + (2 if is_gated else 1) * tokens * by_token
    product(op[f.WEIGHT], first, last, size, x, tokens, scratch, pitch, rest, kind)
    if is_gated:
        product(op[f.WEIGHT_2], first, last, size, x, tokens, gated, pitch, rest, kind)
    for t in range(tokens):
        row = longs(longs(op[f.PLAN])[f.SLOTS])[t] if mode == f.TO_SLOTS else t
        sums, by = scratch + t * by_token, gated + t * by_token if is_gated else 0
        to = op[f.TARGET] + (row * stride + first) * width
        _add_bias(sums, op[f.BIAS], first, count, kind)
        if is_gated:
            _add_bias(by, op[f.BIAS_2], first, count, kind)
        if op[f.FLAVOUR] != f.NO_ACTIVATION:
            activate(sums, by, count, op[f.FLAVOUR], kind)
        if mode == f.ADD:
            add_all(sums, count, float_of(op[f.FACTOR]), to, kind)
        else:
            narrow_all(sums, count, to, kind)


@jit_inner_numbers
def _num_pieces(op, job, lanes):
    kind = op[f.KIND]
    if kind in PRODUCTS:
        return (op[f.OUTPUTS] + op[f.PIECE] - 1) // op[f.PIECE]
    if kind == f.ATTEND:
        return longs(op[f.PLAN])[f.NUM_SEGMENTS] * (op[f.SHARED] if lanes is None else op[f.HEADS])
    return min(job[f.TOKENS], TOKEN_PIECES * job[f.THREADS])


@jit_inner_numbers
def _carry_out(job, op, piece, scratch, room, after, kind, lanes, tiles):
    tokens = job[f.TOKENS]
    if op[f.KIND] in PRODUCTS:
        if tiles is not None:
            packed = op[f.SOURCE] if is_packed(op, tokens) else room + ROOM
            multiply_by_tiles(op, tokens, piece, packed, scratch, room, after, tiles)
        else:
            _multiply(op, tokens, piece, scratch, kind)
    elif op[f.KIND] == f.ATTEND:
        if lanes is not None:
            attend(op, piece, scratch, kind)
        if tiles is not None:
            attend_by_tiles(op, piece, scratch, room, columns_of(tokens), tiles)
    else:
        pieces = _num_pieces(op, job, lanes)
        for token in range(tokens * piece // pieces, tokens * (piece + 1) // pieces):
            if op[f.KIND] == f.NORM:
                _normalize(op, token, scratch, kind)
            else:
                _turn(op, token, scratch, kind)


@jit_inner_numbers
def _wait(address, count):
    looks = 0
    while look(address) < count:
        looks += 1
        if looks > _PATIENCE:
            yield_core()
            looks = 0


@jit_inner_numbers
def _op(job, number):
    return longs(job[f.FIRST_OP] + number * f.OP_FIELDS * 8)


@jit_inner_numbers
def _phase(job, first, lanes):
    """Return where operations that may run at the same time end, and the number of their pieces."""
    last, total = first, 0
    while True:
        op = _op(job, last)
        total += _num_pieces(op, job, lanes)
        last += 1
        if not op[f.JOINS_NEXT]:
            return last, total


@jit_inner_numbers
def _place(job, first, piece, lanes):
    """Return the operation of a phase that a piece belongs to, and its number there."""
    count = _num_pieces(_op(job, first), job, lanes)
    while piece >= count:
        piece -= count
        first += 1
        count = _num_pieces(_op(job, first), job, lanes)
    return first, piece


@jit_inner_numbers
def _next_weight(job, first, me, kind, lanes):
    """Return the rows that a thread multiplies first in the next phase that has products, or 0."""
    while first < job[f.NUM_OPS]:
        last, total = _phase(job, first, lanes)
        if _op(job, first)[f.KIND] in PRODUCTS:
            at, piece = _place(job, first, total * me // job[f.THREADS], lanes)
            op = _op(job, at)
            return op[f.WEIGHT] + piece * op[f.PIECE] * op[f.SIZE] * width_of(kind)
        first = last
    return 0


@jit_inner_numbers
def run(address, kind, lanes, tiles):
    """Do one thread's part of the job at an address, which all threads share."""
    job = longs(address)
    tokens, counter, threads = job[f.TOKENS], job[f.COUNTERS], job[f.THREADS]
    me = take(job[f.TICKETS])
    room = job[f.SCRATCH] + me * job[f.SCRATCH_SIZE]
    scratch = room + job[f.TILE_ROOM]
    if tiles is not None:
        configure(room, f.TILE, columns_of(tokens), tiles)
    first = 0
    while first < job[f.NUM_OPS]:
        last, total = _phase(job, first, lanes)
        packed, next_weight = 0, 0
        if tiles is not None:
            next_weight = _next_weight(job, last, me, kind, lanes)
        for other in range(threads):
            owner = (me + other) % threads
            begin, end = total * owner // threads, total * (owner + 1) // threads
            mine = counter + (1 + owner) * f.COUNTER_STRIDE * 8
            while look(mine) < end - begin:
                piece = begin + take(mine)
                if piece >= end:
                    break
                at, part = _place(job, first, piece, lanes)
                op, after = _op(job, at), 0
                if tiles is not None and op[f.KIND] in PRODUCTS:
                    if op[f.SOURCE] != packed and not is_packed(op, tokens):
                        packed = op[f.SOURCE]
                        pack(packed, tokens, op[f.SIZE], room + ROOM)
                    if piece + 1 == end:
                        after = next_weight
                    elif part + 1 == _num_pieces(op, job, lanes):
                        after = _op(job, at + 1)[f.WEIGHT]
                _carry_out(job, op, part, scratch, room, after, kind, lanes, tiles)
                take(counter)
        _wait(counter, total)
        counter += (1 + threads) * f.COUNTER_STRIDE * 8
        first = last
    if tiles is not None:
        release_tiles(room, tiles)


def _entry(kind, lanes, tiles):
    def run_job(address):
        run(address, kind, lanes, tiles)

    return EntryPoint(types.void(types.intp), run_job)


ENTRIES = {
    "bfloat16": _entry(np.uint16(0), 0, None),
    "bfloat16_amx": _entry(np.uint16(0), None, np.uint8(0)),
    "bfloat16_loops": _entry(np.uint16(0), None, np.int8(0)),  # for tests
    "float16": _entry(np.int16(0), 0, None),
    "float32": _entry(np.float32(0.0), 0, None),
}
"""What runs jobs, by the name of its group of functions; see `fields` for jobs."""

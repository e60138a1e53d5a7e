"""Dot products, weighted sums and sums of vectors, which numba compiles into other functions.

The type of the argument `kind` is that of the numbers; there is one version of every function for
each. Sums are float32. Products of bfloat16 numbers are added in pairs (`vdpbf16ps`) if the
processor can.

A sum has the same order whatever is computed beside it: a number's place determines its lane, a
lane adds up its numbers one after the other, and lanes are folded in halves.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lookahead_hf.engines.cpu.kernels.fields import SIDE_BY_SIDE
from lookahead_hf.engines.cpu.kernels.llvm import (
    BFLOAT16,
    F32,
    FLOAT32,
    HAS_PAIRS,
    I32,
    I64,
    LANES,
    LINE,
    add_pairs,
    bytes_of,
    emits,
    emits_float32,
    emits_int64,
    first_lanes,
    fma,
    fold_totals,
    folded,
    in_pieces,
    int64,
    load_pairs,
    load_wide,
    numbers,
    pointer_at,
    prefetch,
    shuffle,
    spread,
    store_vector,
    vector_of,
    wide,
    width_of,
)
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

ROWS = 4 if LANES == 16 else 2  # Rows of a weight that are multiplied side by side


def uses_pairs(kind: Any) -> bool:
    """Return whether products of numbers of a kind are added in pairs."""
    return HAS_PAIRS and bool(kind == BFLOAT16)


def read_as(kind: Any) -> Any:
    """Return the kind of numbers that tokens are read as, for weights of a kind.

    To turn tokens into float32 for each row of a weight takes as long as to multiply them.
    """
    return kind if uses_pairs(kind) else FLOAT32


@partial(emits, result=types.boolean)
def is_widened(context, builder, kind):
    """Return whether tokens have to be turned into float32 before they are multiplied."""
    return context.get_constant(types.boolean, read_as(kind) != kind)


@emits_int64
def in_vector(context, builder, kind):
    """Return how many numbers of a kind are multiplied at a time."""
    return int64(2 * LANES if uses_pairs(kind) else LANES)


def dots(num_rows: int, counts: Sequence[int], lines: int = 0) -> Any:
    """Make a function that multiplies some rows of a weight by `count` tokens.

    The function writes `out[t * out_stride + r] = sum(w[r * w_stride + i] * x[t * x_stride + i])`
    over `i < size`, in float32. Strides count numbers; the other places are addresses. Tokens are
    numbers as of `read_as`. With every vector it also asks memory for some lines from the address
    `ahead` on, which are multiplied next.

    Args:
        num_rows: Rows of the weight, a power of two.
        counts: Numbers of tokens that `count` may be; there is code for each of them.
        lines: Lines to ask for with vectors of a line; narrower ones ask for fewer.
    """

    @emits
    def multiply(
        context, builder, w, w_stride, x, x_stride, size, count, out, out_stride, ahead, kind
    ):
        of_token, pairs = read_as(kind), uses_pairs(kind)
        at_a_time = 2 * LANES if pairs else LANES
        read, add = (load_pairs, add_pairs) if pairs else (load_wide, fma)
        asked = lines and max(1, lines * at_a_time * bytes_of(kind) // LINE)
        zero = ir.Constant(vector_of(F32), [0.0] * LANES)

        def firsts(base: Any, stride: Any, count: int, kind: Any) -> list[Any]:
            by = builder.mul(stride, int64(bytes_of(kind)))
            return [builder.add(base, builder.mul(by, int64(i))) for i in range(count)]

        def multiply_by(num_tokens: int) -> None:
            rows = firsts(w, w_stride, num_rows, kind)
            tokens = firsts(x, x_stride, num_tokens, of_token)
            number_of_sums = num_rows * num_tokens
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(number_of_sums)]

            def add_products(place: Any, rest: Any) -> None:
                weights = [read(builder, each, place, kind, rest) for each in rows]
                for t, token in enumerate(tokens):
                    number = read(builder, token, place, of_token, rest)
                    for r, weight in enumerate(weights):
                        total = sums[t * num_rows + r]
                        builder.store(add(builder, weight, number, builder.load(total)), total)

            num_vectors = builder.udiv(size, int64(at_a_time))
            with cgutils.for_range(builder, num_vectors, intp=I64) as loop:
                if asked:
                    first = builder.add(ahead, builder.mul(loop.index, int64(asked * LINE)))
                    for line in range(asked):
                        prefetch(builder, builder.add(first, int64(line * LINE)))
                add_products(builder.mul(loop.index, int64(at_a_time)), None)
            rest = builder.urem(size, int64(at_a_time))
            with builder.if_then(builder.icmp_unsigned("!=", rest, int64(0)), likely=False):
                add_products(builder.sub(size, rest), rest)
            totals = [builder.load(each) for each in sums]
            _write_totals(builder, totals, num_rows, out, out_stride)

        blocks = [builder.append_basic_block() for _ in counts]
        end = builder.append_basic_block()
        switch = builder.switch(count, blocks[-1])
        for num_tokens, block in zip(counts, blocks, strict=True):
            if block is not blocks[-1]:
                switch.add_case(int64(num_tokens), block)
            builder.position_at_end(block)
            multiply_by(num_tokens)
            builder.branch(end)
        builder.position_at_end(end)

    return multiply


def _write_totals(builder: Any, sums: list[Any], num_rows: int, out: Any, out_stride: Any) -> None:
    num_tokens, each = len(sums) // num_rows, LANES // num_rows  # tokens that fill a vector
    zero = ir.Constant(vector_of(F32), [0.0] * LANES)
    for first in range(0, num_tokens, each):
        some = sums[first * num_rows : (first + each) * num_rows]
        filled = 1 << (len(some) - 1).bit_length()
        totals = fold_totals(builder, some + [zero] * (filled - len(some)))
        for t in range(first, min(first + each, num_tokens)):
            places = [(t - first) * num_rows + r for r in range(num_rows)]
            part = shuffle(builder, totals, totals, places)
            offset = builder.mul(out_stride, int64(t))
            builder.store(part, pointer_at(builder, out, offset, 4, part.type), align=4)


@emits
def touch(context, builder, address, size):
    """Read every cache line of some bytes, in order.

    A core prefetches one stream well, but not four short ones side by side: rows of a weight that
    are multiplied together arrive at 11 GB/s, and at 24 if they were touched first.
    """
    sink = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [I32]), "", "r", side_effect=True)
    count = builder.udiv(size, int64(LINE))
    with cgutils.for_range(builder, count, intp=I64) as loop:
        pointer = pointer_at(builder, address, loop.index, LINE, I32)
        builder.call(sink, (builder.load(pointer),))


def mix(num_queries: int, num_vectors: int, is_partial: bool = False) -> Any:
    """Make a function that adds up values by the weights of some queries.

    The function adds `sum_s(p[q * p_stride + s] * v[slots[s] * v_stride + i])` over `count` slots
    to `out[q * out_stride + i]`, in float32 and in the order of the slots. `slots` is the address
    of int64 numbers, or 0 for the slots 0, 1, 2, ...

    Args:
        num_queries: Queries.
        num_vectors: Vectors of a value.
        is_partial: Whether the only vector has no more than `rest` numbers.
    """

    @emits
    def add_up(
        context, builder, p, p_stride, v, v_stride, slots, count, out, out_stride, rest, kind
    ):
        vector, rest = vector_of(F32), rest if is_partial else None
        pairs = [(q, i) for q in range(num_queries) for i in range(num_vectors)]

        def place(q: int, i: int) -> Any:
            return builder.add(builder.mul(out_stride, int64(q)), int64(i * LANES))

        sums = {
            pair: cgutils.alloca_once_value(
                builder, load_wide(builder, out, place(*pair), FLOAT32, rest)
            )
            for pair in pairs
        }
        is_listed = builder.icmp_unsigned("!=", slots, int64(0))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            slot = cgutils.alloca_once_value(builder, loop.index)
            builder.store(loop.index, slot)
            with builder.if_then(is_listed):
                builder.store(builder.load(pointer_at(builder, slots, loop.index, 8, I64)), slot)
            first = builder.mul(builder.load(slot), v_stride)
            values = [
                load_wide(builder, v, builder.add(first, int64(i * LANES)), kind, rest)
                for i in range(num_vectors)
            ]
            for q in range(num_queries):
                offset = builder.add(builder.mul(p_stride, int64(q)), loop.index)
                weight = spread(
                    builder, builder.load(pointer_at(builder, p, offset, 4, F32)), vector
                )
                for i, value in enumerate(values):
                    total = sums[q, i]
                    builder.store(fma(builder, weight, value, builder.load(total)), total)
        for pair in pairs:
            pointer = pointer_at(builder, out, place(*pair), 4, vector)
            store_vector(builder, builder.load(sums[pair]), pointer, rest)

    return add_up


def _reduced(combine: Any, start: float, fold: Any) -> Any:
    """Make a function that combines `count` numbers in lanes, and folds the lanes."""

    @emits_float32
    def reduce(context, builder, address, count, kind):
        total = cgutils.alloca_once_value(builder, ir.Constant(vector_of(F32), [start] * LANES))

        def add(index: Any, rest: Any) -> None:
            place = builder.mul(index, int64(LANES))
            numbers = load_wide(builder, address, place, kind, rest)
            if rest is not None and start:
                outside = ir.Constant(vector_of(F32), [start] * LANES)
                numbers = builder.select(first_lanes(builder, rest, LANES), numbers, outside)
            builder.store(combine(builder, builder.load(total), numbers), total)

        in_pieces(builder, count, LANES, add)
        return folded(builder, builder.load(total), partial(fold, builder))

    return reduce


def _plus(builder: Any, total: Any, numbers: Any) -> Any:
    return builder.fadd(total, numbers)


def _plus_square(builder: Any, total: Any, numbers: Any) -> Any:
    return fma(builder, numbers, numbers, total)


def _plus_nan(builder: Any, total: Any, numbers: Any) -> Any:
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.fadd(total, builder.uitofp(is_nan, total.type))


def larger(builder: Any, total: Any, numbers: Any) -> Any:
    """Return the larger number of each lane, that of `total` for NaN."""
    return builder.select(builder.fcmp_ordered(">", numbers, total), numbers, total)


sum_of = _reduced(_plus, 0.0, _plus)  # Add up numbers: `sum_of(address, count, kind)`

sum_of_squares = _reduced(_plus_square, 0.0, _plus)
"""Add up the squares of numbers: `sum_of_squares(address, count, kind)`."""

num_nan = _reduced(_plus_nan, 0.0, _plus)  # Count NaN: `num_nan(address, count, kind)`

largest_of = _reduced(larger, float("-inf"), larger)
"""Find the largest number, NaN left out: `largest_of(address, count, kind)`."""


TOUCHED = 12 * 1024
"""Bytes of some rows and tokens up to which the rows are touched before they are multiplied. They
then stay in a core's first cache. More are asked for while others are multiplied."""

_ANY = range(1, SIDE_BY_SIDE + 1)
_OF_SEVERAL = range((SIDE_BY_SIDE + 1) // 2, SIDE_BY_SIDE + 1)  # tokens of one of several blocks

_one = dots(1, [1])
_near, _only = dots(ROWS, _ANY), dots(ROWS, _ANY, 4)
_half, _least = dots(ROWS, _OF_SEVERAL, 2), dots(ROWS, _OF_SEVERAL, 1)


@jit_inner_numbers
def dot(w, x, size, out, kind):
    """Write the product of two vectors."""
    _one(w, size, x, size, size, 1, out, 1, 0, kind)


@jit_inner_numbers
def rows_by_tokens(w, w_stride, x, x_stride, size, count, out, out_stride, kind):
    """Multiply ROWS rows by up to SIDE_BY_SIDE tokens, all of which are in a cache."""
    _near(w, w_stride, x, x_stride, size, count, out, out_stride, 0, kind)


@jit_inner_numbers
def _only_block(w, x, size, count, out, out_stride, ahead, kind):
    _only(w, size, x, size, size, count, out, out_stride, ahead, kind)


@jit_inner_numbers
def _half_block(w, x, size, count, out, out_stride, ahead, kind):
    """Multiply by one of two or three blocks of tokens, each of which asks for a part."""
    _half(w, size, x, size, size, count, out, out_stride, ahead, kind)


@jit_inner_numbers
def _small_block(w, x, size, count, out, out_stride, ahead, kind):
    _least(w, size, x, size, size, count, out, out_stride, ahead, kind)


@jit_inner_numbers
def widen(x, count, room, kind):
    """Write numbers as float32."""
    source, target = numbers(x, kind), numbers(room, np.float32(0.0))
    for i in range(count):
        target[i] = wide(source[i])


@jit_inner_numbers
def product(w, first, last, size, x, tokens, out, out_stride, room, kind):
    """Multiply the rows `first` to `last` of a weight, [any, size], by tokens, [tokens, size].

    The result is [tokens, last - first] float32, with `out_stride` numbers from one token's to the
    next one's. At `room`, SIDE_BY_SIDE tokens fit as float32 numbers.
    """
    if is_widened(kind):
        _product_of_widened(w, first, last, size, x, tokens, out, out_stride, room, kind)
        return
    length, blocks = size * width_of(kind), (tokens + SIDE_BY_SIDE - 1) // SIDE_BY_SIDE
    most = (tokens + blocks - 1) // blocks
    is_touched = blocks <= 2 and (ROWS + most) * length <= TOUCHED
    lines = 4 if blocks == 1 else (2 if blocks <= 3 else 1)
    in_line = max(1, lines * in_vector(kind) * width_of(kind) // LINE)
    part = size // in_vector(kind) * in_line * LINE  # what a block asks for
    row = first
    while row + ROWS <= last:
        at, start = w + row * length, 0
        ahead = at + ROWS * length
        if is_touched:
            touch(at, ROWS * length)
        for block in range(blocks):
            count = (tokens - start + blocks - block - 1) // (blocks - block)
            xs, to = x + start * length, out + (start * out_stride + row - first) * 4
            if is_touched:
                rows_by_tokens(at, size, xs, size, size, count, to, out_stride, kind)
            elif blocks == 1:
                _only_block(at, xs, size, count, to, out_stride, ahead, kind)
            elif blocks <= 3:
                _half_block(at, xs, size, count, to, out_stride, ahead + block * part, kind)
            else:
                _small_block(at, xs, size, count, to, out_stride, ahead + block * part, kind)
            start += count
        row += ROWS
    while row < last:
        for t in range(tokens):
            to = out + (t * out_stride + row - first) * 4
            dot(w + row * length, x + t * length, size, to, kind)
        row += 1


@jit_inner_numbers
def _product_of_widened(w, first, last, size, x, tokens, out, out_stride, room, kind):
    """Multiply as `product` does, block by block: the rows stay in a core's second cache."""
    length, blocks = size * width_of(kind), (tokens + SIDE_BY_SIDE - 1) // SIDE_BY_SIDE
    start = 0
    for block in range(blocks):
        count = (tokens - start + blocks - block - 1) // (blocks - block)
        widen(x + start * length, count * size, room, kind)
        is_touched = block == 0 and ROWS * length + count * size * 4 <= TOUCHED
        row = first
        while row + ROWS <= last:
            at, to = w + row * length, out + (start * out_stride + row - first) * 4
            if is_touched:
                touch(at, ROWS * length)
            if block or is_touched:
                rows_by_tokens(at, size, room, size, size, count, to, out_stride, kind)
            else:
                _only_block(at, room, size, count, to, out_stride, at + ROWS * length, kind)
            row += ROWS
        while row < last:
            for t in range(count):
                to = out + ((start + t) * out_stride + row - first) * 4
                dot(w + row * length, room + t * size * 4, size, to, kind)
            row += 1
        start += count

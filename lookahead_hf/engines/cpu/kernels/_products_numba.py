"""Matrix products that read a weight where the model has it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.engines.cpu.kernels.fields import SIDE_BY_SIDE
from lookahead_hf.engines.cpu.kernels.llvm import LINE
from lookahead_hf.engines.cpu.kernels.scalars import numbers, wide, width_of
from lookahead_hf.engines.cpu.kernels.vectors import ROWS, dots, in_vector, is_widened, touch
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

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
    """Multiply ROWS rows by all tokens, and ask memory for the next rows."""
    _only(w, size, x, size, size, count, out, out_stride, ahead, kind)


@jit_inner_numbers
def _half_block(w, x, size, count, out, out_stride, ahead, kind):
    """Multiply by one of two or three blocks of tokens, each of which asks for a part."""
    _half(w, size, x, size, size, count, out, out_stride, ahead, kind)


@jit_inner_numbers
def _small_block(w, x, size, count, out, out_stride, ahead, kind):
    """Multiply by one of more blocks."""
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

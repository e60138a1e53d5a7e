"""Matrix products that read a weight where the model has it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from lookahead_hf.kernels.cpu.llvm import HAS_PAIRS, LANES, LINE
from lookahead_hf.kernels.cpu.scalars import width_of
from lookahead_hf.kernels.cpu.vectors import MOST_TOKENS, ROWS, dots, touch
from lookahead_hf.ngram_pool.jit import jit_numbers

TOUCHED = 12 * 1024
"""Bytes of some rows and tokens up to which the rows are touched before they are multiplied. They
then stay in a core's first cache. More are asked for while others are multiplied."""

_one = dots(1, 1)
_rows_1, _rows_2, _rows_3 = (dots(ROWS, n) for n in (1, 2, 3))
_rows_4, _rows_5, _rows_6 = (dots(ROWS, min(n, MOST_TOKENS)) for n in (4, 5, 6))
_fetching_1, _fetching_2, _fetching_3 = (dots(ROWS, n, 4) for n in (1, 2, 3))
_fetching_4, _fetching_5, _fetching_6 = (dots(ROWS, min(n, MOST_TOKENS), 4) for n in (4, 5, 6))
_half_3, _half_4, _half_5, _half_6 = (dots(ROWS, min(n, MOST_TOKENS), 2) for n in (3, 4, 5, 6))
_least_3, _least_4, _least_5, _least_6 = (dots(ROWS, min(n, MOST_TOKENS), 1) for n in (3, 4, 5, 6))


@jit_numbers
def dot(w, x, size, out, kind):
    """Write the product of two vectors."""
    _one(w, size, x, size, size, out, 1, 0, kind)


@jit_numbers
def rows_by_tokens(w, w_stride, x, x_stride, size, count, out, out_stride, kind):
    """Multiply ROWS rows by up to MOST_TOKENS tokens, all of which are in a cache."""
    if count == 1:
        _rows_1(w, w_stride, x, x_stride, size, out, out_stride, 0, kind)
    elif count == 2:
        _rows_2(w, w_stride, x, x_stride, size, out, out_stride, 0, kind)
    elif count == 3:
        _rows_3(w, w_stride, x, x_stride, size, out, out_stride, 0, kind)
    elif count == 4:
        _rows_4(w, w_stride, x, x_stride, size, out, out_stride, 0, kind)
    elif count == 5:
        _rows_5(w, w_stride, x, x_stride, size, out, out_stride, 0, kind)
    else:
        _rows_6(w, w_stride, x, x_stride, size, out, out_stride, 0, kind)


@jit_numbers
def _only_block(w, x, size, count, out, out_stride, ahead, kind):
    """Multiply ROWS rows by all tokens, and ask memory for the next rows."""
    if count == 1:
        _fetching_1(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 2:
        _fetching_2(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 3:
        _fetching_3(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 4:
        _fetching_4(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 5:
        _fetching_5(w, size, x, size, size, out, out_stride, ahead, kind)
    else:
        _fetching_6(w, size, x, size, size, out, out_stride, ahead, kind)


@jit_numbers
def _half_block(w, x, size, count, out, out_stride, ahead, kind):
    """The same for one of two or three blocks of tokens, each of which asks for a part."""
    if count == 3:
        _half_3(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 4:
        _half_4(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 5:
        _half_5(w, size, x, size, size, out, out_stride, ahead, kind)
    else:
        _half_6(w, size, x, size, size, out, out_stride, ahead, kind)


@jit_numbers
def _small_block(w, x, size, count, out, out_stride, ahead, kind):
    """The same for one of more blocks."""
    if count == 3:
        _least_3(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 4:
        _least_4(w, size, x, size, size, out, out_stride, ahead, kind)
    elif count == 5:
        _least_5(w, size, x, size, size, out, out_stride, ahead, kind)
    else:
        _least_6(w, size, x, size, size, out, out_stride, ahead, kind)


@jit_numbers
def product(w, first, last, size, x, tokens, out, out_stride, kind):
    """Multiply some rows of a weight by all tokens: [tokens, last - first] float32.

    Args:
        w: Address of the weight, [any, size].
        first: First row.
        last: Row behind the last one.
        size: Numbers of a row.
        x: Address of the tokens, [tokens, size].
        tokens: How many.
        out: Address of the result.
        out_stride: Numbers from one token's results to the next one's.
        kind: Kind of the numbers.
    """
    length, blocks = size * width_of(kind), (tokens + MOST_TOKENS - 1) // MOST_TOKENS
    in_vector = 2 * LANES if HAS_PAIRS and width_of(kind) == 2 else LANES
    most = (tokens + blocks - 1) // blocks
    is_touched = blocks <= 2 and (ROWS + most) * length <= TOUCHED
    lines = 4 if blocks == 1 else (2 if blocks <= 3 else 1)
    part = size // in_vector * lines * LINE  # what a block asks for
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

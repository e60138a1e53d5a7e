"""Kernels that compute number by number, and choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lookahead_hf.engines.cpu.kernels._vectors_numba import (
    largest_of,
    num_nan,
    sum_of,
    sum_of_squares,
)
from lookahead_hf.engines.cpu.kernels.fields import (
    GELU_TANH,
    LAYER_NORM,
    RMS,
    RMS_FROM_ONE,
    RMS_WEIGHTED_WIDE,
    SILU,
)
from lookahead_hf.engines.cpu.kernels.llvm import (
    F32,
    FLOAT32,
    I16,
    LANES,
    all_of,
    emits,
    emits_float32,
    exp_of,
    in_pieces,
    int64,
    load_wide,
    narrowed,
    numbers,
    pointer_at,
    spread,
    store_vector,
    tanh_of,
    vector_of,
    wide,
    widened,
    width_of,
)
from lookahead_hf.ngram_pool.jit import jit_inner_numbers, jit_numbers

# mypy: disable-error-code="no-untyped-def"


_SINGLE = np.float32(0.0)
_ONE = np.float32(1.0)


def _write(builder: Any, made: Any, out: Any, place: Any, rest: Any) -> None:
    """Write a vector of numbers, or of their bits, at a place."""
    width = 2 if made.type.element == I16 else 4
    store_vector(builder, made, pointer_at(builder, out, place, width, made.type), rest)


def _write_all(builder: Any, x: Any, count: Any, out: Any, made_of: Callable[..., Any]) -> None:
    """Write what `made_of(vector, place, rest)` returns for each vector of float32 numbers."""

    def write(index: Any, rest: Any) -> None:
        place = builder.mul(index, int64(LANES))
        numbers = load_wide(builder, x, place, FLOAT32, rest)
        _write(builder, made_of(numbers, place, rest), out, place, rest)

    in_pieces(builder, count, LANES, write)


@emits
def narrow_all(context, builder, x, count, out, kind):
    """Write `count` float32 numbers rounded to a kind."""
    _write_all(builder, x, count, out, lambda x, *_: narrowed(builder, x, kind))


def _near(builder: Any, x: Any, kind: Any) -> Any:
    return widened(builder, narrowed(builder, x, kind), kind)


@emits
def add_all(context, builder, x, count, factor, out, kind):
    """Add float32 numbers, rounded and multiplied by a factor, to numbers of a kind."""
    factors = spread(builder, factor, vector_of(F32))

    def made_of(numbers: Any, place: Any, rest: Any) -> Any:
        added = builder.fmul(_near(builder, numbers, kind), factors)
        before = load_wide(builder, out, place, kind, rest)
        return narrowed(builder, builder.fadd(before, _near(builder, added, kind)), kind)

    _write_all(builder, x, count, out, made_of)


def _activated(builder: Any, x: Any, flavour: int) -> Any:
    def number(value: float) -> Any:
        return all_of(x.type, value)

    if flavour == SILU:
        return builder.fdiv(x, builder.fadd(number(1.0), exp_of(builder, builder.fneg(x))))
    cube = builder.fmul(builder.fmul(builder.fmul(number(0.044715), x), x), x)
    inner = builder.fmul(number(0.7978845608028654), builder.fadd(x, cube))
    above = builder.fadd(number(1.0), tanh_of(builder, inner))
    return builder.fmul(builder.fmul(number(0.5), x), above)


@emits
def activate(context, builder, x, gated, count, flavour, kind):
    """Replace float32 numbers by activations, rounded to a kind.

    They are multiplied by the `gated` numbers, rounded too, unless that is 0.
    """

    def made_of(known: int, is_gated: int, numbers: Any, place: Any, rest: Any) -> Any:
        made = _activated(builder, _near(builder, numbers, kind), known)
        made = _near(builder, made, kind)
        if not is_gated:
            return made
        by = load_wide(builder, gated, place, FLOAT32, rest)
        return builder.fmul(made, _near(builder, by, kind))

    has_gated = builder.icmp_unsigned("!=", gated, int64(0))
    for known, is_gated in product((SILU, GELU_TANH), (0, 1)):
        is_known = builder.icmp_unsigned("==", flavour, int64(known))
        is_same = builder.icmp_unsigned("==", has_gated, has_gated.type(is_gated))
        with builder.if_then(builder.and_(is_known, is_same)):
            _write_all(builder, x, count, x, partial(made_of, known, is_gated))


@emits_float32
def cap_all(context, builder, scores, count, factor, limit):
    """Replace scores by `limit * tanh(score * factor / limit)` if there is a limit.

    Returns the factor that they have to be multiplied by now.
    """
    factors, limits = (spread(builder, each, vector_of(F32)) for each in (factor, limit))

    def made_of(scores: Any, *_: Any) -> Any:
        parts = builder.fdiv(builder.fmul(scores, factors), limits)
        return builder.fmul(limits, tanh_of(builder, parts))

    is_limited = builder.fcmp_ordered(">", limit, F32(0.0))
    with builder.if_then(is_limited):
        _write_all(builder, scores, count, scores, made_of)
    return builder.select(is_limited, F32(1.0), factor)


@emits
def weigh_all(context, builder, scores, count, factor, most):
    """Replace scores by weights, not normalised; `most` is the largest one times the factor."""
    factors, most = (spread(builder, each, vector_of(F32)) for each in (factor, most))

    def made_of(scores: Any, *_: Any) -> Any:
        return exp_of(builder, builder.fsub(builder.fmul(scores, factors), most))

    _write_all(builder, scores, count, scores, made_of)


@jit_inner_numbers
def norm(source, target, weight, bias, size, epsilon, flavour, kind, room):
    """Write the norm of a vector of `size` numbers; `target` may be `source`.

    Vectors are addresses; `bias` may be 0, and the room is for `size` float32 numbers.
    """
    x, w, c = numbers(source, kind), numbers(weight, kind), numbers(room, _SINGLE)
    count = np.float32(size)
    if flavour == LAYER_NORM:
        mean = sum_of(source, size, kind) / count
        for i in range(size):
            c[i] = wide(x[i]) - mean
        scale = _ONE / np.sqrt(sum_of_squares(room, size, _SINGLE) / count + epsilon)
        for i in range(size):
            c[i] = c[i] * scale * wide(w[i])
        if bias:
            b = numbers(bias, kind)
            for i in range(size):
                c[i] += wide(b[i])
        narrow_all(room, size, target, kind)
    else:
        scale = _ONE / np.sqrt(sum_of_squares(source, size, kind) / count + epsilon)
        _scale(source, size, scale, weight, flavour, target, kind)


@emits
def _scale(context, builder, x, count, scale, weight, flavour, out, kind):
    """Write numbers by a scale and by a norm's weight."""
    scales = spread(builder, scale, vector_of(F32))

    def write(known: int, index: Any, rest: Any) -> None:
        place = builder.mul(index, int64(LANES))
        numbers, by = (load_wide(builder, each, place, kind, rest) for each in (x, weight))
        numbers = builder.fmul(numbers, scales)
        if known == RMS:
            numbers = _near(builder, numbers, kind)
        if known == RMS_FROM_ONE:
            by = builder.fadd(all_of(by.type, 1.0), by)
        _write(builder, narrowed(builder, builder.fmul(numbers, by), kind), out, place, rest)

    for known in (RMS, RMS_WEIGHTED_WIDE, RMS_FROM_ONE):
        with builder.if_then(builder.icmp_unsigned("==", flavour, int64(known))):
            in_pieces(builder, count, LANES, partial(write, known))


@emits
def rotate(context, builder, source, target, cos, sin, dim, rotated, is_wide, kind):
    """Rotate the first `rotated` of `dim` numbers of a head; `target` may be `source`.

    A pair has one number in each half. Float32 angles (`is_wide`) leave products unrounded. If
    nothing is rotated, no angles are read.
    """
    half = builder.lshr(rotated, int64(1))

    def turn(of_angles: Any, index: Any, rest: Any) -> None:
        low = builder.mul(index, int64(LANES))
        places = low, builder.add(low, half)
        x = [load_wide(builder, source, place, kind, rest) for place in places]
        for place, own, other in zip(places, x, (builder.fneg(x[1]), x[0]), strict=True):
            c, s = (load_wide(builder, each, place, of_angles, rest) for each in (cos, sin))
            parts = [builder.fmul(own, c), builder.fmul(other, s)]
            if of_angles == kind:
                parts = [_near(builder, each, kind) for each in parts]
            made = narrowed(builder, builder.fadd(*parts), kind)
            _write(builder, made, target, place, rest)

    def keep(index: Any, rest: Any) -> None:
        place = builder.add(rotated, builder.mul(index, int64(LANES)))
        numbers = load_wide(builder, source, place, kind, rest)
        _write(builder, narrowed(builder, numbers, kind), target, place, rest)

    with builder.if_else(builder.icmp_unsigned("!=", is_wide, is_wide.type(0))) as (wide, own):
        for branch, of_angles in ((wide, FLOAT32), (own, kind)):
            with branch:
                in_pieces(builder, half, LANES, partial(turn, of_angles))
    in_pieces(builder, builder.sub(dim, rotated), LANES, keep)


AT_A_TIME = 1024  # Scores that stay in a core's first cache while they are compared


@jit_numbers
def argmax(address, count, kind):
    """Return the place of the first largest of `count` numbers, or of the first NaN."""
    x, largest, start = numbers(address, kind), -np.float32(np.inf), 0
    for first in range(0, count, AT_A_TIME):
        size, place = min(AT_A_TIME, count - first), address + first * width_of(kind)
        if num_nan(place, size, kind) > np.float32(0.0):
            for i in range(first, first + size):
                if wide(x[i]) != wide(x[i]):
                    return i
        found = largest_of(place, size, kind)
        if found > largest:
            largest, start = found, first
    for i in range(start, count):
        if wide(x[i]) == largest:
            return i
    return 0


@jit_numbers
def compact(words, lengths, path, num_kept):
    """Move the tokens of a path together; see `kernels.compact_path`.

    Args:
        words: `PathTable.words`, of 4 bytes each.
        lengths: Slots of each row before node 0, [rows].
        path: Node numbers, ascending, [rows, any].
        num_kept: Entries of `path` that count, [rows].
    """
    for tensor in range(len(words)):
        address, by_row, by_slot, width = words[tensor]
        x = numbers(address, _SINGLE)
        for row in range(len(path)):
            first = row * by_row + lengths[row] * by_slot
            for i in range(num_kept[row]):
                if path[row, i] != i:
                    source, target = first + path[row, i] * by_slot, first + i * by_slot
                    for j in range(width):
                        x[target + j] = x[source + j]

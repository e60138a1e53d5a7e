"""Kernels that compute number by number, and choices."""

from __future__ import annotations

import numpy as np

from lookahead_hf.engines.cpu.kernels._vectors_numba import (
    largest_of,
    narrow_all,
    near_all,
    num_nan,
    sum_of,
    sum_of_squares,
    widen,
)
from lookahead_hf.engines.cpu.kernels.fields import LAYER_NORM, RMS, RMS_FROM_ONE
from lookahead_hf.engines.cpu.kernels.llvm import numbers, wide, width_of
from lookahead_hf.ngram_pool.jit import jit_inner_numbers, jit_numbers

# mypy: disable-error-code="no-untyped-def"


_SINGLE = np.float32(0.0)
_ONE = np.float32(1.0)
_INFINITE = np.float32(np.inf)


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
    else:
        scale = _ONE / np.sqrt(sum_of_squares(source, size, kind) / count + epsilon)
        for i in range(size):
            c[i] = wide(x[i]) * scale
        if flavour == RMS:
            near_all(room, size, kind)
        if flavour == RMS_FROM_ONE:
            for i in range(size):
                c[i] *= _ONE + wide(w[i])
        else:
            for i in range(size):
                c[i] *= wide(w[i])
    narrow_all(room, size, target, kind)


@jit_inner_numbers
def rotate(source, target, cos, sin, dim, rotated, is_wide, kind, room):
    """Rotate the first `rotated` of `dim` numbers of a head; `target` may be `source`.

    A pair has one number in each half. `cos` is an address, or 0 to rotate nothing. Float32 angles
    (`is_wide`) leave products unrounded. The room is for five heads of float32 numbers.
    """
    length = dim * 4
    x, own, other = room, room + length, room + 2 * length
    widen(source, dim, x, kind)
    widen(source, dim, own, kind)
    if cos:
        half = rotated // 2
        angles = room + 3 * length, room + 4 * length
        if is_wide:
            angles = cos, sin
        else:
            widen(cos, rotated, angles[0], kind)
            widen(sin, rotated, angles[1], kind)
        given, a, b = numbers(x, _SINGLE), numbers(own, _SINGLE), numbers(other, _SINGLE)
        c, s = numbers(angles[0], _SINGLE), numbers(angles[1], _SINGLE)
        for i in range(half):
            b[i] = -given[i + half] * s[i]
            b[i + half] = given[i] * s[i + half]
        for i in range(rotated):
            a[i] *= c[i]
        if not is_wide:
            near_all(own, rotated, kind)
            near_all(other, rotated, kind)
        for i in range(rotated):
            a[i] += b[i]
    narrow_all(own, dim, target, kind)


AT_A_TIME = 1024  # Scores that stay in a core's first cache while they are compared


@jit_numbers
def argmax(address, count, kind):
    """Return the place of the first largest of `count` numbers, or of the first NaN."""
    x, largest, start = numbers(address, kind), -_INFINITE, 0
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

"""Kernels that compute number by number, and choices."""

from __future__ import annotations

import numpy as np

from lookahead_hf.engines.cpu.kernels._vectors_numba import (
    largest_of,
    num_nan,
    sum_of,
    sum_of_squares,
)
from lookahead_hf.engines.cpu.kernels.fields import LAYER_NORM, RMS, RMS_FROM_ONE, SILU
from lookahead_hf.engines.cpu.kernels.llvm import narrow, numbers, power_of_two, wide, width_of
from lookahead_hf.ngram_pool.jit import jit_inner_numbers, jit_numbers

# mypy: disable-error-code="no-untyped-def"


_SINGLE = np.float32(0.0)
_ONE, _TWO, _HALF = np.float32(1.0), np.float32(2.0), np.float32(0.5)
_WHOLE = np.float32(12582912.0)  # adding and taking it away leaves a whole number
_INFINITE = np.float32(np.inf)
_GELU, _CUBE = np.float32(0.7978845608028654), np.float32(0.044715)


@jit_inner_numbers
def near(number, kind):
    """Return a float32 number rounded to a kind."""
    return wide(narrow(number, kind))


@jit_inner_numbers
def exp(x):
    """Return e**x within two units of the last place, without a call, so that loops vectorise."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = (x * np.float32(1.44269504) + _WHOLE) - _WHOLE  # rounded
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return p * power_of_two(n)


@jit_inner_numbers
def tanh(x):
    """Return the hyperbolic tangent."""
    return _ONE - _TWO / (exp(_TWO * x) + _ONE)


@jit_inner_numbers
def activate(address, count, flavour, kind):
    """Replace `count` float32 numbers by their activations, rounded to a kind."""
    x = numbers(address, _SINGLE)
    if flavour == SILU:
        for i in range(count):
            a = near(x[i], kind)
            x[i] = near(a / (_ONE + exp(-a)), kind)
    else:
        for i in range(count):
            a = near(x[i], kind)
            x[i] = near(_HALF * a * (_ONE + tanh(_GELU * (a + _CUBE * a * a * a))), kind)


@jit_inner_numbers
def norm(source, target, weight, bias, size, epsilon, flavour, kind, centred):
    """Write the norm of a vector of `size` numbers; `target` may be `source`.

    Vectors are addresses; `bias` may be 0, and `centred` has room for `size` float32 numbers.
    """
    x, out, w = numbers(source, kind), numbers(target, kind), numbers(weight, kind)
    count = np.float32(size)
    if flavour == LAYER_NORM:
        mean = sum_of(source, size, kind) / count
        c = numbers(centred, _SINGLE)
        for i in range(size):
            c[i] = wide(x[i]) - mean
        scale = _ONE / np.sqrt(sum_of_squares(centred, size, _SINGLE) / count + epsilon)
        if bias:
            b = numbers(bias, kind)
            for i in range(size):
                out[i] = narrow(c[i] * scale * wide(w[i]) + wide(b[i]), kind)
        else:
            for i in range(size):
                out[i] = narrow(c[i] * scale * wide(w[i]), kind)
        return
    scale = _ONE / np.sqrt(sum_of_squares(source, size, kind) / count + epsilon)
    if flavour == RMS:
        for i in range(size):
            out[i] = narrow(wide(w[i]) * near(wide(x[i]) * scale, kind), kind)
    elif flavour == RMS_FROM_ONE:
        for i in range(size):
            out[i] = narrow(wide(x[i]) * scale * (_ONE + wide(w[i])), kind)
    else:
        for i in range(size):
            out[i] = narrow(wide(w[i]) * (wide(x[i]) * scale), kind)


@jit_inner_numbers
def rotate(source, target, cos, sin, dim, rotated, is_wide, kind, room):
    """Rotate the first `rotated` of `dim` numbers of a head; `target` may be `source`.

    A pair has one number in each half. `cos` is an address, or 0 to rotate nothing. Float32 angles
    (`is_wide`) leave products unrounded. The head is in the room meanwhile: loops that may write
    what they read are not made of vectors.
    """
    given, x, out = numbers(source, kind), numbers(room, kind), numbers(target, kind)
    for i in range(dim):
        x[i] = given[i]
    half = rotated // 2 if cos else 0
    if is_wide:
        c, s = numbers(cos, _SINGLE), numbers(sin, _SINGLE)
        for i in range(half):
            out[i] = narrow(wide(x[i]) * c[i] + -wide(x[i + half]) * s[i], kind)
        for i in range(half, 2 * half):
            out[i] = narrow(wide(x[i]) * c[i] + wide(x[i - half]) * s[i], kind)
    else:
        a, b = numbers(cos, kind), numbers(sin, kind)
        for i in range(half):
            other = near(-wide(x[i + half]) * wide(b[i]), kind)
            out[i] = narrow(near(wide(x[i]) * wide(a[i]), kind) + other, kind)
        for i in range(half, 2 * half):
            other = near(wide(x[i - half]) * wide(b[i]), kind)
            out[i] = narrow(near(wide(x[i]) * wide(a[i]), kind) + other, kind)
    for i in range(2 * half, dim):
        out[i] = x[i]


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

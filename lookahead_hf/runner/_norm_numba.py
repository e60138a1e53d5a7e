"""Compiled root mean square norm of bfloat16 numbers, with the bits of torch's operations.

The squares are added up in the order of torch's sum over a contiguous dimension (`cascade_sum` in
ATen's SumKernel.cpp), which uses registers of eight numbers on every processor. NaN may have other
bits than torch's NaN.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from lookahead_hf.ngram_pool.jit import jit

LANES, REGISTERS = 8, 4
"""Numbers of a register, and registers that torch adds up side by side."""

WIDTH = LANES * REGISTERS

NUM_LEVELS, LEAST_POWER = 4, 4
"""Levels of sums, and the logarithm of the fewest terms after which a sum moves up a level."""


@intrinsic
def _pointer(typing_context, address):
    """Turn an address into a pointer to bfloat16 numbers, as their bits."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint16)(types.int64), generate


@jit
def norm(out_address, x_address, weight_address, rows, size, epsilon):
    """Write the norm of every row, times the weight.

    Args:
        out_address: Address of the result, [rows, size] bfloat16.
        x_address: Address of the input, [rows, size] bfloat16.
        weight_address: Address of the weight, [size] bfloat16.
        rows: Number of rows.
        size: Numbers of a row.
        epsilon: What is added to the mean of the squares.
    """
    out, x, weight = _pointer(out_address), _pointer(x_address), _pointer(weight_address)
    sums = np.empty((NUM_LEVELS, WIDTH), np.float32)
    for row in range(rows):
        first = row * size
        root = np.sqrt(_mean_of_squares(x, first, size, sums) + np.float32(epsilon))
        scale = np.float32(np.inf) if root == 0 else np.float32(1.0) / root  # numba would raise
        for i in range(size):
            scaled = _rounded(_number(x[first + i]) * scale)
            out[first + i] = _rounded(_number(weight[i]) * _number(scaled))


@jit
def means_of_squares(means, x_address, size):
    """Write the mean of the squares of every row, [rows] float32; `x` as in `norm`."""
    x, sums = _pointer(x_address), np.empty((NUM_LEVELS, WIDTH), np.float32)
    for row in range(len(means)):
        means[row] = _mean_of_squares(x, row * size, size, sums)


@jit
def _mean_of_squares(x, first, size, sums):
    num_vectors = size // LANES
    num_blocks = num_vectors // REGISTERS
    power = _level_power(num_blocks)
    sums[:] = np.float32(0.0)
    lowest = sums[0]
    for block in range(num_blocks):
        for j in range(WIDTH):
            number = _number(x[first + block * WIDTH + j])
            lowest[j] += number * number
        if (block + 1) % (1 << power) == 0:
            _carry(sums, block + 1, power)
    for level in range(1, NUM_LEVELS):
        for j in range(WIDTH):
            lowest[j] += sums[level, j]
    for vector in range(num_blocks * REGISTERS, num_vectors):
        for j in range(LANES):
            number = _number(x[first + vector * LANES + j])
            lowest[j] += number * number
    for register in range(1, REGISTERS):
        for j in range(LANES):
            lowest[j] += lowest[register * LANES + j]
    total = np.float32(0.0)
    for i in range(num_vectors * LANES, size):
        number = _number(x[first + i])
        total += number * number
    for j in range(LANES):
        total += lowest[j]
    return total / np.float32(size)


@jit
def _level_power(num_blocks):
    """Return the logarithm of how many terms a level adds up."""
    power = 0
    while 1 << power < num_blocks:
        power += 1
    return max(LEAST_POWER, power // NUM_LEVELS)


@jit
def _carry(sums, done, power):
    """Move the sums of full levels up, after so many blocks."""
    for level in range(1, NUM_LEVELS):
        for j in range(WIDTH):
            sums[level, j] += sums[level - 1, j]
            sums[level - 1, j] = np.float32(0.0)
        if done & (((1 << power) - 1) << (level * power)):
            break


@jit
def _number(bits):
    """The float32 number of a bfloat16 one."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@jit
def _rounded(number):
    """The bits of the bfloat16 number that is nearest, the even one of two."""
    bits = np.float32(number).view(np.uint32)
    if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)  # NaN
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

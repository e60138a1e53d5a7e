"""The choice of tokens, and the moves of accepted ones."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from lookahead_hf.kernels.cpu.scalars import numbers, wide
from lookahead_hf.kernels.cpu.vectors import largest_of, num_nan
from lookahead_hf.ngram_pool.jit import jit_numbers


@jit_numbers
def argmax(address, count, kind):
    """Return the place of the first largest of `count` numbers, or of the first NaN."""
    x = numbers(address, kind)
    if num_nan(address, count, kind) > np.float32(0.0):
        for i in range(count):
            if wide(x[i]) != wide(x[i]):
                return i
    largest = largest_of(address, count, kind)
    for i in range(count):
        if wide(x[i]) == largest:
            return i
    return 0


@jit_numbers
def compact(words, lengths, path, num_kept, word):
    """Move the tokens of a path together; see `dispatch.compact_path`.

    Args:
        words: `PathTable.words`.
        lengths: Slots of each row before node 0, [rows].
        path: Node numbers, ascending, [rows, any].
        num_kept: Entries of `path` that count, [rows].
        word: Kind of the words that are moved.
    """
    for tensor in range(len(words)):
        address, by_row, by_slot, width = words[tensor]
        x = numbers(address, word)
        for row in range(len(path)):
            first = row * by_row + lengths[row] * by_slot
            for i in range(num_kept[row]):
                if path[row, i] != i:
                    source, target = first + path[row, i] * by_slot, first + i * by_slot
                    for j in range(width):
                        x[target + j] = x[source + j]

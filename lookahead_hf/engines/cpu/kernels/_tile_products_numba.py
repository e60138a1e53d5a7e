"""Matrix products by tiles, which read a weight where the model has it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from numba.extending import register_jitable

from lookahead_hf.engines.cpu.kernels.tile_vectors import pack_tokens, store_tile
from lookahead_hf.engines.cpu.kernels.tiles import (
    STATE,
    STEP,
    TILE,
    TILE_BYTES,
    configure,
    tile_dots,
)
from lookahead_hf.ngram_pool.jit import jit_inner_numbers

BLOCKS = 4
"""Most blocks of up to 16 tokens that a tile of rows is multiplied by at a time."""

CHUNK = 20 * 1024
"""Bytes of packed tokens that stay in a core's first cache while rows pass by. Tokens from the
second cache are not free: they compete with the weight on its way from memory."""

GROUP = 64
"""Most rows that pass by one chunk of tokens, whose sums are kept meanwhile."""

SUMS_AT = STATE + TILE_BYTES
"""Where sums are in a thread's room: behind its state and a tile for the end of rows."""

ROOM = SUMS_AT + GROUP // TILE * BLOCKS * TILE_BYTES
"""Bytes of a thread's room, packed tokens aside."""

_by_1, _by_2, _by_3, _by_4 = (tile_dots(count) for count in range(1, BLOCKS + 1))


@register_jitable
def columns_of(tokens):
    """Return the tokens of a block: as even as possible, 16 at most."""
    blocks = (tokens + TILE - 1) // TILE
    return (tokens + blocks - 1) // blocks


@register_jitable
def bytes_of_block(size, columns):
    """Return the bytes of a packed block, and of what packing overwrites behind it."""
    return (size + STEP - 1) // STEP * TILE * columns * 4 + 64


@register_jitable
def bytes_of_packed(tokens, size):
    """Return the bytes of all packed blocks of tokens, [tokens, size]."""
    return (tokens + TILE - 1) // TILE * bytes_of_block(size, columns_of(tokens))


@jit_inner_numbers
def is_packed(tokens, size):
    """Return whether tokens are packed as they are."""
    return tokens == 1 and size % STEP == 0


@jit_inner_numbers
def pack(x, tokens, size, out):
    """Pack all blocks of tokens, [tokens, size]."""
    columns = columns_of(tokens)
    of_block = bytes_of_block(size, columns)
    for first in range(0, tokens, columns):
        count = min(columns, tokens - first)
        pack_tokens(x + first * size * 2, size * 2, count, columns, size, out)
        out += of_block


@jit_inner_numbers
def _multiply(
    w, length, x, by, blocks, columns, steps, tail, c, is_first, ahead, rows, room, tiles
):
    if blocks == 1:
        _by_1(w, length, x, by, columns, steps, tail, c, is_first, ahead, rows, room, tiles)
    elif blocks == 2:
        _by_2(w, length, x, by, columns, steps, tail, c, is_first, ahead, rows, room, tiles)
    elif blocks == 3:
        _by_3(w, length, x, by, columns, steps, tail, c, is_first, ahead, rows, room, tiles)
    else:
        _by_4(w, length, x, by, columns, steps, tail, c, is_first, ahead, rows, room, tiles)


@jit_inner_numbers
def _group(
    w, length, rows, size, x, blocks, tokens, columns, out, stride, room, ahead, asks, tiles
):
    """Multiply up to GROUP rows by up to BLOCKS blocks of tokens, chunk by chunk."""
    by, steps = bytes_of_block(size, columns), size // STEP
    chunk = max(1, CHUNK // (blocks * columns * 64))
    parts = max(1, (steps + chunk - 1) // chunk)
    chunk = (steps + parts - 1) // parts
    start = 0
    while True:
        count = min(chunk, steps - start)
        is_last = start + count == steps
        tail = size % STEP if is_last else 0
        is_first, at_x = 1 if start == 0 else 0, x + start * TILE * columns * 4
        c = room + SUMS_AT
        for row in range(0, rows, TILE):
            height = min(TILE, rows - row)
            at = w + row * length + start * 64
            asked = ahead if asks else at
            if height < TILE:
                configure(room, height, columns, tiles)
            _multiply(
                at, length, at_x, by, blocks, columns, count, tail, c, is_first, asked, height,
                room, tiles,
            )  # fmt: skip
            if height < TILE:
                configure(room, TILE, columns, tiles)
            ahead += count * TILE_BYTES
            if is_last:
                for first in range(0, tokens, columns):
                    to = out + (first * stride + row) * 4
                    filled = min(columns, tokens - first)
                    store_tile(c + first // columns * TILE_BYTES, filled, to, stride * 4, height)
            c += blocks * TILE_BYTES
        start += count
        if is_last:
            break


@jit_inner_numbers
def product_by_tiles(w, length, rows, size, x, tokens, out, stride, room, after, tiles):
    """Multiply some rows of a weight, each `length` bytes behind the last one, by packed tokens.

    The result is [tokens, rows] float32, with `stride` numbers from one token's to the next one's.
    `configure(room, TILE, columns_of(tokens))` was called on this thread, whose room has ROOM
    bytes. At `after` is what the thread multiplies next.
    """
    columns = columns_of(tokens)
    blocks = (tokens + columns - 1) // columns
    passes = (blocks + BLOCKS - 1) // BLOCKS
    for row in range(0, rows, GROUP):
        count = min(GROUP, rows - row)
        at = w + row * length
        ahead = at + count * length if row + count < rows else after
        start = 0
        for each in range(passes):
            some = (blocks - start + passes - each - 1) // (passes - each)
            first = start * columns
            to, filled = out + (first * stride + row) * 4, min(some * columns, tokens - first)
            at_x = x + start * bytes_of_block(size, columns)
            _group(
                at, length, count, size, at_x, some, filled, columns, to, stride, room, ahead,
                each == 0, tiles,
            )  # fmt: skip
            start += some

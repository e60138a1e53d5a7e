"""Products of tiles by AMX, which numba compiles into other functions, and loops that do the same.

A thread has eight tiles of up to 16 rows of 64 bytes. Of the three in a product, A is 16 rows of a
weight as it lies in memory, B is up to 16 tokens in pairs (`pack_tokens`), and C has float32 sums,
[rows of the weight, tokens]:

    C[m][n] += sum over 16 pairs k: A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1]

LLVM orders instructions on numbered tiles with memory, and does nothing about their configuration:
it is ours. The type of the argument `tiles` says what code there is: `AMX`, or `LOOPS`, which keep
the tiles in memory and run on any processor. Their results have the same bits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable

from lookahead_hf.engines.cpu.kernels.fields import TILE
from lookahead_hf.engines.cpu.kernels.llvm import (
    I64,
    declared,
    emits,
    flushed_fma,
    int64,
    load_bits,
    numbers,
    pointer_at,
    prefetch,
    wide,
)

AMX, LOOPS = types.uint8, types.int8
"""What tiles are computed by: the types of the argument `tiles`."""

STEP = 32  # Numbers of a row that a tile holds

TILE_BYTES = 1024

STATE = 64 + 8 * TILE_BYTES
"""Bytes of a thread's configuration, and of the tiles that loops keep behind it."""

SUMS, ROWS_AT, TOKENS_AT = range(4), (4, 5), (6, 7)
"""Tiles by what they hold, so that one configuration serves all kernels."""

I8 = ir.IntType(8)
BYTES = I8.as_pointer()

_SINGLE, _HALF, _BYTE = np.float32(0.0), np.uint16(0), np.uint8(0)
_ONE = np.float32(1.0)


class Tiles:
    """Emits the instructions on the tiles of the thread whose room is at `room`."""

    def __init__(self, context: Any, builder: Any, room: Any, tiles: Any) -> None:
        self._context, self._builder, self._room = context, builder, room
        self._by_loops = tiles == LOOPS

    def _emit(self, name: str, loops: Any, tiles: tuple[int, ...], *places: Any) -> None:
        """Emit the instruction, or a call of its loops; the first place is an address."""
        builder = self._builder
        if self._by_loops:
            arguments = [self._room, *map(int64, tiles), *places]
            signature = types.void(*[types.int64] * len(arguments))
            self._context.compile_internal(builder, loops, signature, arguments)
            return
        pointers = [builder.inttoptr(each, BYTES) for each in places[:1]]
        given = [*map(I8, tiles), *pointers, *places[1:]]
        function = declared(
            builder, ir.VoidType(), [each.type for each in given], f"llvm.x86.{name}"
        )
        builder.call(function, given)

    def configure(self) -> None:
        """Load the configuration from the room; this also sets all tiles to zero."""
        self._emit("ldtilecfg", _configure, (), self._room)

    def release(self) -> None:
        self._emit("tilerelease", _release, ())

    def zero(self, tile: int) -> None:
        self._emit("tilezero", _zero, (tile,))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self._emit("tileloadd64", _load, (tile,), address, stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._emit("tilestored64", _store, (tile,), address, stride)

    def add_products(self, total: int, a: int, b: int) -> None:
        self._emit("tdpbf16ps", _add_products, (total, a, b))


# The instructions as loops over the tiles in memory.


def _configure(room, address):
    for tile in range(8):
        _zero(room, tile)


def _release(room):
    """Leave the tiles: that they are in their first state only saves time."""


@register_jitable
def _zero(room, tile):
    number = numbers(room + 64 + tile * TILE_BYTES, _SINGLE)
    for i in range(TILE_BYTES // 4):
        number[i] = _SINGLE


@register_jitable
def _copy(room, tile, source, source_stride, to, to_stride):
    """Copy as many rows and bytes as the configuration gives a tile."""
    rows, width = numbers(room + 48 + tile, _BYTE)[0], numbers(room + 16 + 2 * tile, _HALF)[0]
    for row in range(rows):
        of_row, to_row = (
            numbers(source + row * source_stride, _BYTE),
            numbers(to + row * to_stride, _BYTE),
        )
        for i in range(width):
            to_row[i] = of_row[i]


def _load(room, tile, address, stride):
    _zero(room, tile)
    _copy(room, tile, address, stride, room + 64 + tile * TILE_BYTES, 64)


def _store(room, tile, address, stride):
    _copy(room, tile, room + 64 + tile * TILE_BYTES, 64, address, stride)


def _add_products(room, total, a, b):
    """Add up even and odd numbers each from zero, then both, then add that to the total."""
    tiles = room + 64
    rows = numbers(room + 48 + total, _BYTE)[0]
    columns = numbers(room + 16 + 2 * total, _HALF)[0] // 4
    pairs = numbers(room + 16 + 2 * a, _HALF)[0] // 4
    for m in range(rows):
        x = numbers(tiles + a * TILE_BYTES + m * 64, _HALF)
        sums = numbers(tiles + total * TILE_BYTES + m * 64, _SINGLE)
        for n in range(columns):
            even, odd = _SINGLE, _SINGLE
            for k in range(pairs):
                y = numbers(tiles + b * TILE_BYTES + k * 64 + n * 4, _HALF)
                even = flushed_fma(wide(x[2 * k]), wide(y[0]), even)
                odd = flushed_fma(wide(x[2 * k + 1]), wide(y[1]), odd)
            sums[n] = flushed_fma(_ONE, sums[n], flushed_fma(_ONE, even, odd))


@emits
def release_tiles(context, builder, room, tiles):
    """Return the tiles to their first state, so that Linux need not save 8 KB for the thread."""
    Tiles(context, builder, room, tiles).release()


@emits
def configure(context, builder, room, rows, columns, tiles):
    """Load a configuration for rows and tokens; the STATE bytes at `room` stay the thread's."""
    width = builder.mul(columns, int64(4))
    of_tile = dict.fromkeys(SUMS, (rows, width))
    of_tile |= dict.fromkeys(ROWS_AT, (rows, int64(64)))
    of_tile |= dict.fromkeys(TOKENS_AT, (int64(TILE), width))
    words = [int64(1)] + [int64(0)] * 7  # palette 1, start row 0
    for tile, (height, bytes_of_row) in of_tile.items():
        at, shift = 2 + tile // 4, tile % 4 * 16
        words[at] = builder.or_(words[at], builder.shl(bytes_of_row, int64(shift)))
        words[6] = builder.or_(words[6], builder.shl(height, int64(8 * tile)))
    for i, word in enumerate(words):
        builder.store(word, pointer_at(builder, room, int64(i), 8, I64), align=1)
    Tiles(context, builder, room, tiles).configure()


def tile_dots(num_a: int, num_b: int) -> Any:
    """Make a function that multiplies tiles of a weight by tiles of tokens, 1 or 2 of each.

    The function reads row r at `w + r * pitch` and block b of tokens, as `pack_tokens` writes it
    with `width` tokens, at `x + b * by`: `steps` tiles each. Tile a of rows by block b,
    [16][width] float32, is written to `c + b * gap + a * 1024`. Strides are bytes.

    With every tile of the weight it asks memory for lines from `ahead` on: `ask` quarters of as
    many as the tile has. If `tail` is not 0, there is a last tile of `tail` numbers (1 to 31):
    tiles have no masks, so its rows are copied to the room behind the state, with zeros behind
    them. A single tile has `rows` rows.
    """
    sums = [SUMS[a * num_b : (a + 1) * num_b] for a in range(num_a)]

    @emits
    def multiply(
        context, builder, w, pitch, x, by, width, steps, tail, c, gap, ahead, ask, rows, room, tiles
    ):
        emit = Tiles(context, builder, room, tiles)
        blocks = [builder.add(x, builder.mul(by, int64(b))) for b in range(num_b)]
        heights = [builder.mul(pitch, int64(TILE * a)) for a in range(num_a)]
        b_row = builder.mul(width, int64(4))
        b_tile = builder.mul(b_row, int64(TILE))
        starts = [builder.add(c, builder.mul(gap, int64(b))) for b in range(num_b)]

        def add_products(at_b: Any, load_rows: Any) -> None:
            for n in range(max(num_a, num_b)):
                if n < num_a:
                    load_rows(n, ROWS_AT[n])
                if n < num_b:
                    emit.load(TOKENS_AT[n], builder.add(blocks[n], at_b), b_row)
            for b, a in product(range(num_b), range(num_a)):
                emit.add_products(sums[a][b], ROWS_AT[a], TOKENS_AT[b])

        for total in range(num_a * num_b):
            emit.zero(total)
        quarter = num_a * TILE // 4
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            at_a = builder.add(w, builder.mul(loop.index, int64(2 * STEP)))
            asked = builder.mul(builder.mul(loop.index, ask), int64(quarter * 64))
            with cgutils.for_range(builder, ask, intp=I64) as inner:
                first = builder.mul(inner.index, int64(quarter * 64))
                first = builder.add(builder.add(ahead, asked), first)
                for line in range(quarter):
                    prefetch(builder, builder.add(first, int64(line * 64)))

            def load_rows(a: int, rows_at: int) -> None:
                emit.load(rows_at, builder.add(at_a, heights[a]), pitch)

            add_products(builder.mul(loop.index, b_tile), load_rows)
        with builder.if_then(builder.icmp_unsigned("!=", tail, int64(0)), likely=False):
            first = builder.add(w, builder.mul(steps, int64(2 * STEP)))
            copied = builder.add(room, int64(STATE))
            height = rows if num_a == 1 else int64(TILE)

            def copy_rows(a: int, rows_at: int) -> None:
                of_tile = builder.add(first, heights[a])
                with cgutils.for_range(builder, height, intp=I64) as loop:
                    source = builder.add(of_tile, builder.mul(pitch, loop.index))
                    bits = load_bits(builder, source, int64(0), 2, STEP, tail)
                    to = pointer_at(builder, copied, loop.index, 64, bits.type)
                    builder.store(bits, to, align=2)
                emit.load(rows_at, copied, int64(64))

            add_products(builder.mul(steps, b_tile), copy_rows)
        for b, a in product(range(num_b), range(num_a)):
            emit.store(sums[a][b], builder.add(starts[b], int64(a * TILE_BYTES)), b_row)

    return multiply


MIXED = 4  # Tiles of values that are added up side by side


@contextmanager
def mixing(
    builder: Any, emit: Tiles, weights: Any, values: Any, by: Any, out: Any
) -> Iterator[Callable[[Any], None]]:
    """Hold sums, tiles of [16 numbers][16 queries] at `out`, while values are added to them.

    The function that it gives adds the values of a chunk of 32 slots by their weights (`weigh`).
    Values are as `turn` writes them; those of the next chunk are `by` bytes behind.
    """
    places = [builder.add(out, int64(d * TILE_BYTES)) for d in range(MIXED)]

    def add(chunk: Any) -> None:
        at = builder.add(weights, builder.mul(chunk, int64(2 * TILE_BYTES)))
        for tile, part in zip(TOKENS_AT, (0, TILE_BYTES), strict=True):
            emit.load(tile, builder.add(at, int64(part)), int64(64))
        at = builder.add(values, builder.mul(chunk, by))
        for d in range(MIXED):
            emit.load(ROWS_AT[d % 2], builder.add(at, int64(d * TILE_BYTES)), int64(64))
            for part in TOKENS_AT:
                emit.add_products(d, ROWS_AT[d % 2], part)

    for d, place in enumerate(places):
        emit.load(d, place, int64(64))
    yield add
    for d, place in enumerate(places):
        emit.store(d, place, int64(64))


@emits
def mix(context, builder, weights, values, by, chunks, out, room, tiles):
    """Add up the values of chunks of 32 slots; see `mixing`."""
    emit = Tiles(context, builder, room, tiles)
    with (
        mixing(builder, emit, weights, values, by, out) as add,
        cgutils.for_range(builder, chunks, intp=I64) as loop,
    ):
        add(loop.index)

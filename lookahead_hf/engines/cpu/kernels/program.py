"""Runs programs of a model's layers, and the plans of their attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from lookahead_hf.engines.cpu import team
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions, NumbaMissingError

if TYPE_CHECKING:  # the process that compiles works without it
    import torch

    from lookahead_hf.kernels.data import PathTable

KINDS = {"bfloat16": np.uint16(0), "float32": np.float32(0.0), "float16": np.int16(0)}
"""Dtypes that there are kernels for, each with a number of the kind that its bits are held as."""

MOST_TOKENS = 512
"""Most tokens of a block, which decides how large buffers are."""

PARTS = 8  # Segments that each thread should have in a long block; no result depends on them


def groups_of(dtypes: Iterable[torch.dtype]) -> list[Functions]:
    """Return the groups of functions that serve layers of some dtypes, in the order of need."""
    names = [_own_name(dtype) + tiles_of(dtype) for dtype in dict.fromkeys(dtypes) if serves(dtype)]
    return [*(compilation.kernels[name] for name in names), compilation.common] if names else []


def serves(dtype: torch.dtype) -> bool:
    """Return whether there are kernels for a dtype."""
    return _own_name(dtype) in KINDS


def _own_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def tiles_of(dtype: torch.dtype) -> str:
    """Return what multiplies numbers of a dtype by tiles in this process: "_amx", or "" for none.

    It never depends on the width of a block, since vectors add up numbers in another order. Tests
    have "_loops" returned, which do what AMX does.
    """
    if _own_name(dtype) != "bfloat16" or not team.may_use_tiles():
        return ""
    with suppress(NumbaMissingError):
        functions()
        from lookahead_hf.engines.cpu.kernels.llvm import HAS_TILES

        return "_amx" if HAS_TILES else ""
    return ""


def segment_of(dtype: torch.dtype, tokens: int) -> int:
    """Return the most tokens of a segment in the plans of a block for layers of a dtype."""
    if not tiles_of(dtype):
        return fields.SIDE_BY_SIDE
    return max(fields.TILE, min(4 * fields.TILE, tokens // (PARTS * team.num_threads())))


def is_ready(dtype: torch.dtype) -> bool:
    """Return whether there are kernels for a dtype, and they are loaded."""
    return serves(dtype) and all(each.is_loaded() for each in groups_of([dtype]))


def functions() -> ModuleType:
    """Return the module of the compiled functions; NumbaMissingError without numba."""
    with compilation.importing_numba():
        from lookahead_hf.engines.cpu.kernels import _program_numba
    return _program_numba


Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What the tokens of some consecutive rows of a block see: the first arguments of `plan_rows`."""


class Plan:
    """What attention sees in the layers that take the same mask.

    Attributes:
        address: Address of the plan's fields.
        pitch: Room for the scores of a token.
        slots: Slot of each token's K and V, [tokens] int64 into [rows * capacity].
        span: The most slots from the first that a token sees to the last.
        segments: Tokens that see the same slots, [segments, fields] int64.
        tails: Slots within a row that tokens see one by one, int64.
    """

    def __init__(
        self, slots: np.ndarray, parts: Sequence[Part], most: int = fields.SIDE_BY_SIDE
    ) -> None:
        """Plan a block whose K and V are in `slots`, and which consists of `parts`.

        `most` is the most tokens of a segment, as of `segment_of`.
        """
        from lookahead_hf.engines.cpu.kernels._attention_numba import plan_rows

        num_tokens = len(slots)
        segments = np.empty((num_tokens, fields.SEGMENT_FIELDS), np.int64)
        self._starts = np.zeros(num_tokens + 1, np.int64)
        tails = np.empty(sum(above.size * above.shape[1] for above, *_ in parts), np.int64)
        self.slots = slots
        first, num_segments, pitch = 0, 0, 0
        for part in parts:
            room = segments[num_segments:], self._starts, tails
            added, longest = plan_rows(*part, first, most, *room)
            first, num_segments = first + int(part[1].sum()), num_segments + added
            pitch = max(pitch, longest)
        self.pitch = (pitch + 15) // 16 * 16
        self.segments, self.tails = segments[:num_segments], tails[: self._starts[-1]]
        self._fields = np.array(
            [
                slots.ctypes.data,
                segments.ctypes.data,
                num_segments,
                self._starts.ctypes.data,
                tails.ctypes.data,
                self.pitch,
            ],
            np.int64,
        )
        self.address = self._fields.ctypes.data

    @cached_property
    def span(self) -> int:
        last = int(self.tails.max()) + 1 if len(self.tails) else 0
        ends = np.maximum(self.segments[:, fields.END], last)
        return int((ends - self.segments[:, fields.BEGIN]).max())


class JobRunner:
    """Scratch memory, counters and the job with which one caller runs programs.

    `ops` are the operations, [operations, fields] int64.
    """

    def __init__(self, ops: np.ndarray, dtype: torch.dtype) -> None:
        self.ops, self._dtype = ops, dtype
        self._job, self._counters = np.zeros(fields.JOB_FIELDS, np.int64), np.zeros(0, np.int64)
        self._tickets, self._scratch = np.zeros(1, np.int64), np.empty(0, np.float32)
        self._job[fields.TICKETS] = self._tickets.ctypes.data
        self._address, self._first = self._job.ctypes.data, ops.ctypes.data
        self._longest = int(ops[:, fields.SIZE].max(initial=0))

    @cached_property
    def _entry(self) -> int:
        return _entry_of(_own_name(self._dtype) + tiles_of(self._dtype))

    def run(self, first: int, count: int, num_tokens: int, floats: int) -> None:
        """Carry out `count` operations; each thread has room for `floats` float32 numbers."""
        num_threads, room = team.num_threads(), self._tile_room(num_tokens)
        floats = (floats + room // 4 + 63) // 64 * 64
        num_counters = count * (1 + num_threads) * fields.COUNTER_STRIDE
        job = self._job
        if len(self._counters) < num_counters:
            self._counters = np.empty(num_counters, np.int64)
            job[fields.COUNTERS] = self._counters.ctypes.data
        if len(self._scratch) < floats * num_threads + 16:
            self._scratch = np.empty(floats * num_threads * 5 // 4 + 16, np.float32)
        job[fields.SCRATCH] = (self._scratch.ctypes.data + 63) // 64 * 64  # lines of a cache
        job[fields.TOKENS], job[fields.NUM_OPS] = num_tokens, count
        job[fields.FIRST_OP] = self._first + first * self.ops.strides[0]
        job[fields.SCRATCH_SIZE] = floats * 4
        job[fields.THREADS], job[fields.TILE_ROOM] = num_threads, room
        self._counters[:num_counters] = 0
        self._tickets[0] = 0
        team.run(self._entry, self._address, num_threads)

    def _tile_room(self, num_tokens: int) -> int:
        """Return the bytes of a thread's tiles and packed tokens; 0 without tiles."""
        if not tiles_of(self._dtype):
            return 0
        from lookahead_hf.engines.cpu.kernels._tiles_numba import ROOM, bytes_of_packed

        return int(ROOM + bytes_of_packed(num_tokens, self._longest) + 63) // 64 * 64


def _entry_of(name: str) -> int:
    return int(functions().ENTRIES[name].address)


def tile_floats(slots: int, dim: int) -> int:
    """Return the float32 numbers that a thread needs room for when it attends by tiles."""
    from lookahead_hf.engines.cpu.kernels._tiles_numba import attention_places

    return int(attention_places(slots, dim)[-1]) // 4


def argmax(scores: torch.Tensor) -> int:
    """Return the index of the first largest number of a contiguous tensor of one of `KINDS`."""
    from lookahead_hf.engines.cpu.kernels import _elementwise_numba

    kind = KINDS[_own_name(scores.dtype)]
    return int(_elementwise_numba.argmax(scores.data_ptr(), scores.numel(), kind))


def compact_path(
    table: PathTable, lengths: np.ndarray, path: np.ndarray, num_kept: np.ndarray
) -> None:
    """Move the tokens of a path to the front, in a table of words of 4 bytes."""
    from lookahead_hf.engines.cpu.kernels import _elementwise_numba

    _elementwise_numba.compact(table.words.numpy(), lengths, path, num_kept)


def _load_plans() -> None:
    none, one = np.zeros((1, 1), np.int64), np.ones(1, np.int64)
    Plan(one - 1, [(none - 1, one, one - 1, none, none[:0], none, one - 1)])


def _load_words() -> None:
    from lookahead_hf.engines.cpu.kernels import _elementwise_numba

    none = np.zeros(0, np.int64)
    _elementwise_numba.compact(none.reshape(0, 4), none, none.reshape(0, 1), none)


def _load_layers(name: str) -> None:
    """Load a dtype's group; RuntimeError if the processor cannot convert such numbers."""
    functions()
    from lookahead_hf.engines.cpu.kernels import _elementwise_numba
    from lookahead_hf.engines.cpu.kernels.llvm import HAS_FLOAT16

    if name == "float16" and not HAS_FLOAT16:
        raise RuntimeError("the processor has no instructions that convert float16 numbers")
    assert _entry_of(name)
    one = np.zeros(1)  # large enough for a number of any kind
    assert _elementwise_numba.argmax(one.ctypes.data, 1, KINDS[name.partition("_")[0]]) == 0


compilation.common.register(_load_plans, _load_words)
for _name, _functions in compilation.kernels.items():
    _functions.register(partial(_load_layers, _name))

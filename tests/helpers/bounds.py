"""Checks that the compiled kernels stay within weights, buffers and caches, in every call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.engines.cpu import step
from lookahead_hf.engines.cpu.descriptions import numbers_at
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels._tiles_numba import blocks_of, bytes_of_packed
from lookahead_hf.engines.cpu.kernels.program import MOST_TOKENS, Plan, tile_floats, tiles_of
from lookahead_hf.engines.cpu.programs import Program
from lookahead_hf.engines.cpu.workspace import CompiledLayer, Workspace


@contextmanager
def bounds_checked() -> Iterator[list[CompiledLayer]]:
    """Check every plan and every program before it is used; yield the layers that were checked."""
    done: list[CompiledLayer] = []
    plan_for, launch = step.plan_for, Workspace._launch

    def planned(context: Any, mask: Any, group: Any, *rest: Any) -> Plan | None:
        plan = plan_for(context, mask, group, *rest)
        if plan is not None:
            check_plan(plan, len(group.dropped), group.capacity)
        return plan

    def launched(
        self: Workspace, layers: Sequence[CompiledLayer], num_tokens: int, floats: int
    ) -> None:
        for layer in layers:
            check_layer(self, layer, num_tokens, floats)
        done.extend(layers)
        launch(self, layers, num_tokens, floats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "plan_for", planned)
        patch.setattr(Workspace, "_launch", launched)
        yield done


def check_layer(workspace: Workspace, layer: CompiledLayer, num_tokens: int, floats: int) -> None:
    """Check the program of a layer, whose addresses are filled in."""
    own = layer.program
    memory: dict[int | str, torch.UntypedStorage] = {
        at: weight.untyped_storage() for at, weight in enumerate(own.weights)
    }
    memory |= {name: workspace._buffer(name, own).untyped_storage() for name in own.buffers}
    ops = workspace._flat.reshape(-1, fields.OP_FIELDS)[layer.first :][: len(own.ops)]
    check_bounds(own, ops, memory, num_tokens, floats)


def check_plan(plan: Plan, rows: int, capacity: int) -> None:
    """Check that tokens are written and seen within a cache of `rows` times `capacity` slots."""
    segments, tails, slots = plan.segments, plan.tails, plan.slots
    begins, ends = segments[:, fields.BEGIN], segments[:, fields.END]
    firsts, counts = segments[:, fields.FIRST], segments[:, fields.COUNT]
    row_slots = segments[:, fields.ROW_SLOT]
    _check("slots", bool(((slots >= 0) & (slots < rows * capacity)).all()))
    _check("rows", bool(((row_slots >= 0) & (row_slots <= (rows - 1) * capacity)).all()))
    _check("runs", bool(((begins >= 0) & (begins <= ends) & (ends <= capacity)).all()))
    _check("tails", bool(((tails >= 0) & (tails < capacity)).all()))
    _check("tokens", firsts.tolist() == (counts.cumsum() - counts).tolist())
    _check("tokens of the block", int(counts.sum()) == len(slots))


def check_bounds(
    program: Program,
    ops: np.ndarray,
    memory: Mapping[int | str, torch.UntypedStorage],
    num_tokens: int,
    floats: int,
) -> None:
    """Check that a program reads and writes only inside its tensors.

    `ops` are its operations with all addresses, [operations, fields]. `memory` is that of each
    weight, by its number, and of each buffer, by its name. A thread has room for `floats` numbers.
    """
    _check("tokens", 0 < num_tokens <= MOST_TOKENS)
    for op, field, of, _ in program.places:
        start, count = int(ops[op, field]), numbers_at(program.ops[op]).get(field, 0)
        count *= 1 if isinstance(of, int) else num_tokens
        if field == fields.TARGET and ops[op, fields.MODE] == fields.PACK:
            count = bytes_of_packed(num_tokens, count // num_tokens) // 2
        if own := memory.get(of):
            last = own.data_ptr() + own.nbytes() - count * program.dtype.itemsize
            _check(f"field {field} of operation {op}", own.data_ptr() <= start <= last)
        else:
            _check(f"the address of {of}", start != 0 or not count)
    by_tiles = bool(tiles_of(program.dtype))
    for op, values in enumerate(ops):
        _check(f"scratch of operation {op}", _scratch(values, num_tokens, by_tiles) <= floats)


def _scratch(op: np.ndarray, num_tokens: int, by_tiles: bool) -> int:
    """Return the float32 numbers that a thread writes during an operation."""
    kind = op[fields.KIND]
    if kind in (fields.LINEAR, fields.GATED):
        numbers = blocks_of(num_tokens) * 512 if by_tiles else num_tokens * int(op[fields.PIECE])
        return numbers * (2 if kind == fields.GATED else 1)
    if kind != fields.ATTEND:
        return 2 * int(op[fields.SIZE])
    plan = _longs(op[fields.PLAN], fields.PLAN_FIELDS)
    size = int(plan[fields.NUM_SEGMENTS]) * fields.SEGMENT_FIELDS
    segments = _longs(plan[fields.SEGMENTS], size).reshape(-1, fields.SEGMENT_FIELDS)
    counts = segments[:, fields.COUNT]
    _check("tokens of a plan", int(counts.sum()) == num_tokens)
    if by_tiles:
        return max(_scratch_of_tiles(op, plan, segment) for segment in segments)
    return int(counts.max() * (plan[fields.PITCH] + op[fields.SIZE])) + 64


def _scratch_of_tiles(op: np.ndarray, plan: np.ndarray, segment: np.ndarray) -> int:
    """Return the float32 numbers that a thread writes when it attends by tiles for a segment."""
    first, last = segment[fields.FIRST], segment[fields.FIRST] + segment[fields.COUNT]
    starts = _longs(plan[fields.TAIL_STARTS], last + 1)
    tails = _longs(plan[fields.TAILS], starts[-1])[starts[first] :]
    slots = max([segment[fields.END], *(tails + 1)]) - segment[fields.BEGIN]
    return tile_floats(slots, op[fields.SIZE])


def _longs(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(int(address)))


def _check(what: str, fits: bool) -> None:
    if not fits:
        raise IndexError(f"the kernels would read or write outside of their room: {what}")

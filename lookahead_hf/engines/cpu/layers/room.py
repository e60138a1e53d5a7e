"""What kernels work in: plans of a block's tokens, and buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.program import MOST_TOKENS, Plan, Workspace
from lookahead_hf.engines.cpu.layers.programs import Program

_Part = tuple[np.ndarray, np.ndarray, np.ndarray]


def plan_of(
    mask: Any, group: SlotGroup, rows: int, width: int, flat: Any, most: int = fields.SIDE_BY_SIDE
) -> Plan | None:
    """Return which slots the tokens of a block see, None if its mask does not say so.

    Args:
        mask: The mask that a layer gets, [rows, 1, width, visible] or None; for a flat block the
            stand-in for its masks.
        group: The layers of the cache that take it.
        rows: Rows of the block.
        width: Tokens per row.
        flat: The flat block, else None.
        most: Most tokens of a segment.
    """
    block, capacity = group.block, group.capacity
    if block is None:
        return None
    if block.flat_slots is not None:
        slots = np.ascontiguousarray(block.flat_slots.numpy(), np.int64)
    else:
        assert block.span is not None
        span = np.arange(block.span.start, block.span.stop)
        slots = (np.arange(rows)[:, None] * capacity + span).reshape(-1)
    if flat is not None:
        parts = [_of_run(each, capacity) for each in flat.masks_of(mask)]
    else:
        seen = _seen(mask, rows, width, block.visible)
        if seen is None:
            return None
        parts = [(seen, np.full(rows, width, np.int64), np.arange(rows) * capacity)]
    if len(slots) != rows * width or not _fit(slots, parts, len(group.dropped), capacity):
        return None
    return Plan(slots, parts, most)


def _fit(slots: np.ndarray, parts: list[_Part], rows: int, capacity: int) -> bool:
    """Return whether parts cover each token, and all slots are in the cache."""
    counts = sum(int(of_rows.sum()) for _, of_rows, _ in parts)
    last = max(int(firsts.max()) for _, _, firsts in parts) // capacity
    are_seen = all(seen.shape[2] <= capacity for seen, _, _ in parts)
    is_inside = int(slots.min()) >= 0 and max(int(slots.max()) // capacity, last) < rows
    return counts == len(slots) and are_seen and is_inside


def _of_run(of_run: Any, capacity: int) -> _Part:
    """Return which slots the tokens of a run see, each row's number of tokens and first slot."""
    run = of_run.run
    counts = run.counts.astype(np.int64)
    seen = _seen(of_run.mask, len(counts), run.width, of_run.visible)
    if seen is None:  # beginnings of texts: each token sees those before it
        seen = np.tri(run.width, of_run.visible, dtype=bool)[None].repeat(len(counts), 0)
    return seen, counts, np.arange(run.rows.start, run.rows.stop) * capacity


def _seen(mask: Any, rows: int, width: int, visible: int) -> np.ndarray | None:
    """Return which slots tokens see, [rows, width, visible]; None if the mask does not say so."""
    if mask is None:
        return np.ones((rows, 1, visible), bool) if width == 1 else None
    if type(mask) is not torch.Tensor or mask.dim() != 4 or mask.shape[1] != 1:
        return None
    if mask.shape[2] != width or mask.shape[3] < visible:
        return None
    mask = mask[:, 0, :, :visible]
    seen = mask if mask.dtype == torch.bool else mask == 0
    if seen is not mask and not bool((seen | (mask <= _lowest(mask.dtype))).all()):
        return None  # a bias of the scores
    whole: np.ndarray = seen.expand(rows, -1, -1).contiguous().numpy()
    return whole


def _lowest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min if dtype.is_floating_point else -math.inf


ARGUMENTS = ("stream", "out", "k_store", "v_store", "plan", "cos", "sin", "rotated", "wide")
"""Arguments of a program in a step; all but the last two are addresses."""

Arguments = tuple[int, int, int, int, int, int, int, int, int]


class Unit:
    """A layer that kernels compute.

    Attributes:
        module: A decoder layer, or a linear layer outside of those.
        program: Its operations.
        first: Place of the first of them among those of all units.
        is_trusted: Whether the kernels reproduced the module in its first step; None before that.
    """

    def __init__(self, module: Any, program: Program, first: int) -> None:
        self.module, self.program, self.first = module, program, first
        self.is_trusted: bool | None = None


class Room:
    """Operations of all `units`, and the buffers that they work in."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        count = sum(len(unit.program.ops) for unit in units)
        ops = np.zeros((count, fields.OP_FIELDS), np.int64)
        self._ops = ops
        self._flat, self._addresses = ops.reshape(-1), dict[tuple[int, int], "_Addresses"]()
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        for unit in units:
            program = unit.program
            for at, values in enumerate(program.ops, unit.first):
                ops[at, list(values)] = list(values.values())
            for place in program.places:
                if place.of in program.buffers:
                    at = (unit.first + place.op) * fields.OP_FIELDS + place.field
                    self._flat[at] = self._buffer(str(place.of), program).data_ptr()
        dtypes = {unit.program.dtype for unit in units}
        self._spaces = {dtype: Workspace(ops, dtype) for dtype in dtypes}

    def _buffer(self, name: str, program: Program) -> torch.Tensor:
        key = name, program.buffers[name], program.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(MOST_TOKENS, key[1], dtype=key[2])
        return self._buffers[key]

    def run(
        self, units: Sequence[Unit], given: Sequence[Arguments], num_tokens: int, floats: int
    ) -> None:
        """Run the programs of consecutive units, each with its arguments, on a block of tokens.

        Attention needs room for `floats` float32 numbers per thread.
        """
        key = units[0].first, len(units)
        if key not in self._addresses:
            self._addresses[key] = _Addresses(units)
        held = self._addresses[key].fill(self._flat, given)
        floats = max(floats, *(unit.program.floats(num_tokens) for unit in units))
        self._launch(units, num_tokens, floats)
        del held  # not before: another thread may replace a weight in the meantime

    def _launch(self, units: Sequence[Unit], num_tokens: int, floats: int) -> None:
        """Carry out the operations of units, whose addresses are filled in."""
        count = sum(len(unit.program.ops) for unit in units)
        self._spaces[units[0].program.dtype].run(units[0].first, count, num_tokens, floats)


class _Addresses:
    """The fields of units' operations that hold addresses of weights and arguments."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._tensors = [weight for unit in units for weight in unit.program.weights]
        self._dtypes = [weight.dtype for weight in self._tensors]
        self._sizes = np.array([weight.nbytes for weight in self._tensors], np.int64)
        weights, arguments = list[tuple[int, int, int]](), list[tuple[int, int]]()
        num_weights = 0
        for index, unit in enumerate(units):
            for op, field, of, offset in unit.program.places:
                at = (unit.first + op) * fields.OP_FIELDS + field
                if isinstance(of, int):
                    weights.append((at, num_weights + of, offset))
                elif of not in unit.program.buffers:
                    arguments.append((at, index * len(ARGUMENTS) + ARGUMENTS.index(of)))
            num_weights += len(unit.program.weights)
        self._weight_at, self._weight, self._offset = np.array(weights, np.int64).T
        self._argument_at, self._argument = np.array(arguments, np.int64).T

    def fill(self, flat: np.ndarray, given: Sequence[Arguments]) -> list[torch.UntypedStorage]:
        """Write the addresses into the operations, [fields of all]; return the weights' memory.

        The caller holds the memory while kernels read it.

        Raises:
            RuntimeError: It was freed, or another thread has changed a weight.
        """
        memory = list(map(torch.Tensor.untyped_storage, self._tensors))
        at = np.array(list(map(torch.Tensor.data_ptr, self._tensors)), np.int64)
        starts = np.array(list(map(torch.UntypedStorage.data_ptr, memory)), np.int64)
        ends = starts + np.array(list(map(torch.UntypedStorage.nbytes, memory)), np.int64)
        is_there = (starts > 0) & (starts <= at) & (at + self._sizes <= ends)
        if not is_there.all() or [tensor.dtype for tensor in self._tensors] != self._dtypes:
            raise RuntimeError("the memory of a weight was freed or changed within a forward")
        flat[self._weight_at] = at[self._weight] + self._offset
        flat[self._argument_at] = np.array(given, np.int64).reshape(-1)[self._argument]
        return memory

"""The memory in which one thread runs the programs of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead_hf.kernels.cpu import fields
from lookahead_hf.kernels.cpu.program import MOST_TOKENS, Workspace
from lookahead_hf.patches.layers.programs import Program

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

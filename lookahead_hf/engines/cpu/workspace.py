"""Plans of a block's tokens for the kernels, and the buffers that these work in."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from lookahead_hf.block.block import Block
from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.program import MOST_TOKENS, JobRunner, Part, Plan
from lookahead_hf.engines.cpu.programs import Program
from lookahead_hf.runner.forward import ForwardContext


def plan_for(
    context: ForwardContext,
    mask: Any,
    group: SlotGroup,
    rows: int,
    width: int,
    most: int = fields.SIDE_BY_SIDE,
) -> Plan | None:
    """Return which slots the tokens of a block, `width` of each row, see in a group of layers.

    It is None if a layer got another mask than ours. A segment has `most` tokens.
    """
    place, capacity, block = group.block, group.capacity, context.block
    kind = None if place is None or block is None else block.kind_of(mask, group)
    if place is None or block is None or kind is None:
        return None
    if place.slot_mapping is not None:
        slots = np.ascontiguousarray(place.slot_mapping.numpy(), np.int64)
    else:
        assert place.span is not None
        span = np.arange(place.span.start, place.span.stop)
        slots = (np.arange(rows)[:, None] * capacity + span).reshape(-1)
    parts = [_planned(own, kind, counts, row * capacity) for own, counts, row in block.parts]
    num_tokens = sum(int(counts.sum()) for _, counts, *_ in parts)
    is_inside = int(slots.min()) >= 0 and int(slots.max()) < len(group.dropped) * capacity
    is_inside &= all(int((held + added).max()) <= capacity for _, added, held, *_ in parts)
    is_whole = num_tokens == len(slots) == rows * width
    return Plan(slots, parts, most) if is_inside and is_whole else None


def _planned(block: Block, kind: str, counts: np.ndarray, first_slot: int) -> Part:
    """Return what tokens see of rows whose first slot is this one of the cache."""
    held, query = block.held[kind], block.query.numpy()
    least = columns = np.empty((0, 0), np.int64)
    if held.columns is not None:
        columns = np.ascontiguousarray(held.columns.numpy())
        least = held.kind.least_seen(query, block.pads.numpy()[:, None])
    row_slots = first_slot + np.arange(len(counts)) * held.group.capacity
    lengths = held.lengths.numpy()
    return (block.parents, counts, lengths, query, least, columns, row_slots)


ARGUMENTS = ("stream", "out", "k_store", "v_store", "plan", "cos", "sin", "rotated", "wide")
"""Arguments of a program in a step; all but the last two are addresses."""


class CompiledLayer:
    """A layer that kernels compute.

    Attributes:
        module: A decoder layer, or a linear layer outside of those.
        attention: The attention of a decoder layer, else None.
        program: Its operations.
        first: Place of the first of them among those of all layers.
        is_trusted: Whether the kernels reproduced the module in its first step; None before that.
    """

    def __init__(self, module: Any, program: Program, first: int) -> None:
        self.module, self.program, self.first = module, program, first
        self.attention: Any = getattr(module, "self_attn", None)
        self.is_trusted: bool | None = None


class Workspace:
    """Operations of all `layers`, and the buffers that they work in.

    Attributes:
        head_dim: The most numbers of a head.
    """

    def __init__(self, layers: Sequence[CompiledLayer]) -> None:
        self.layers = layers
        count = sum(len(layer.program.ops) for layer in layers)
        ops = np.zeros((count, fields.OP_FIELDS), np.int64)
        self._flat, self._addresses = ops.reshape(-1), dict[tuple[int, int], "_Addresses"]()
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        for layer in layers:
            program = layer.program
            for at, values in enumerate(program.ops, layer.first):
                ops[at, list(values)] = list(values.values())
            for place in program.places:
                if place.of in program.buffers:
                    at = (layer.first + place.op) * fields.OP_FIELDS + place.field
                    self._flat[at] = self._buffer(str(place.of), program).data_ptr()
        programs = [layer.program for layer in layers]
        self.head_dim = max((each.head_dim for each in programs), default=0)
        self._piece, self._vector = ops[:, [fields.PIECE, fields.SIZE]].max(0, initial=0).tolist()
        dtypes = {each.dtype for each in programs}
        self._runners = {dtype: JobRunner(ops, dtype) for dtype in dtypes}

    def _buffer(self, name: str, program: Program) -> torch.Tensor:
        key = name, program.buffers[name], program.dtype
        if key not in self._buffers:
            rows, size = MOST_TOKENS + MOST_TOKENS // fields.TILE, (key[1] + 31) // 32 * 32
            self._buffers[key] = torch.empty(rows, size, dtype=key[2])  # also for packed tokens
        return self._buffers[key]

    def run(
        self, layers: Sequence[CompiledLayer], given: np.ndarray, num_tokens: int, floats: int
    ) -> None:
        """Run the programs of consecutive layers on a block of tokens.

        `given` are their arguments, [layers, arguments] int64. Attention needs room for `floats`
        float32 numbers per thread.
        """
        key = layers[0].first, len(layers)
        if key not in self._addresses:
            self._addresses[key] = _Addresses(layers)
        held = self._addresses[key].fill(self._flat, given)
        self._launch(layers, num_tokens, max(floats, self._floats(num_tokens)))
        del held  # not before: another thread may replace a weight in the meantime

    def _floats(self, num_tokens: int) -> int:
        """Return the float32 numbers that a thread needs room for, attention aside."""
        piece, vector = self._piece, self._vector
        return 2 * max(num_tokens * piece, vector) + fields.SIDE_BY_SIDE * vector + 1024

    def _launch(self, layers: Sequence[CompiledLayer], num_tokens: int, floats: int) -> None:
        count = sum(len(layer.program.ops) for layer in layers)
        self._runners[layers[0].program.dtype].run(layers[0].first, count, num_tokens, floats)


_dtype_of = attrgetter("dtype")


class _Addresses:
    """The fields of layers' operations that hold addresses of weights and arguments."""

    def __init__(self, layers: Sequence[CompiledLayer]) -> None:
        self._tensors = [weight for layer in layers for weight in layer.program.weights]
        self._dtypes = list(map(_dtype_of, self._tensors))
        self._sizes = np.array([weight.nbytes for weight in self._tensors], np.int64)
        weights, arguments = list[tuple[int, int, int]](), list[tuple[int, int]]()
        num_weights = 0
        for index, layer in enumerate(layers):
            for op, field, of, offset in layer.program.places:
                at = (layer.first + op) * fields.OP_FIELDS + field
                if isinstance(of, int):
                    weights.append((at, num_weights + of, offset))
                elif of not in layer.program.buffers:
                    arguments.append((at, index * len(ARGUMENTS) + ARGUMENTS.index(of)))
            num_weights += len(layer.program.weights)
        self._weight_at, self._weight, self._offset = np.array(weights, np.int64).T
        self._argument_at, self._argument = np.array(arguments, np.int64).T
        self._found: list[list[Any]] = []

    def fill(self, flat: np.ndarray, given: np.ndarray) -> list[torch.UntypedStorage]:
        """Write the addresses into the operations, [fields of all]; return the weights' memory.

        The caller holds the memory while kernels read it. RuntimeError if it was freed, or another
        thread has changed a weight.
        """
        memory = list(map(torch.Tensor.untyped_storage, self._tensors))
        found = [list(map(each, self._tensors)) for each in (torch.Tensor.data_ptr, _dtype_of)]
        if found != self._found:
            at = np.array(found[0], np.int64)
            starts, sizes = np.array([(each.data_ptr(), each.nbytes()) for each in memory]).T
            is_there = (starts > 0) & (starts <= at) & (at + self._sizes <= starts + sizes)
            if not is_there.all() or found[1] != self._dtypes:
                raise RuntimeError("the memory of a weight was freed or changed within a forward")
            self._found, self._weights = found, at[self._weight] + self._offset
        flat[self._weight_at] = self._weights
        flat[self._argument_at] = given.reshape(-1)[self._argument]
        return memory

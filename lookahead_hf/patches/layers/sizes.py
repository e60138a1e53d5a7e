"""Checks that the operations of a program stay within the tensors that they are given.

The kernels compute addresses from sizes, and nothing else stops them at the end of a tensor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import numpy as np
import torch

from lookahead_hf.kernels.cpu import fields
from lookahead_hf.kernels.cpu.program import MOST_TOKENS, Plan
from lookahead_hf.patches.layers.programs import Program, Unknown

is_checked = os.environ.get("LOOKAHEAD_HF_CHECK_BOUNDS") == "1"
"""Whether every call of the kernels is checked, which takes longer than the call itself."""


def numbers_at(op: dict[int, int]) -> dict[int, int]:
    """Return the numbers that an operation uses at each address: per token, or of a weight."""
    size, outputs, heads = (op.get(at, 0) for at in (fields.SIZE, fields.OUTPUTS, fields.HEADS))
    if op[fields.KIND] in (fields.LINEAR, fields.GATED):
        weight = size * outputs
        of_weights = {fields.WEIGHT: weight, fields.WEIGHT_2: weight}
        of_biases = {fields.BIAS: outputs, fields.BIAS_2: outputs}
        return {fields.SOURCE: size, fields.TARGET: outputs} | of_weights | of_biases
    of_token = {fields.SOURCE: heads * size, fields.TARGET: heads * size}
    if op[fields.KIND] == fields.ATTEND:
        stored = op[fields.SHARED] * size
        return of_token | {fields.WEIGHT: stored, fields.WEIGHT_2: stored}
    return of_token | {fields.WEIGHT: size, fields.BIAS: size}


def check_sizes(program: Program) -> None:
    """Raise Unknown unless the sizes of operations, buffers and weights agree."""
    stored = program.shared_heads * program.head_dim
    of_token = {"stream": program.size, "out": program.outputs}
    of_token |= {"k_store": stored, "v_store": stored} | program.buffers
    for op, field, of, offset in program.places:
        needed = numbers_at(program.ops[op]).get(field)
        if isinstance(of, int):
            assert needed is not None
            fits = offset + needed * program.dtype.itemsize <= program.weights[of].num_bytes
        else:
            fits = needed is None or needed == of_token[of]
        if not fits:
            raise Unknown("weights differ in size from what they are multiplied by")


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

    Args:
        program: The program.
        ops: Its operations with all addresses, [operations, fields].
        memory: Memory of each weight, by its number, and of each buffer, by its name.
        num_tokens: Tokens of the block.
        floats: Float32 numbers that a thread has room for.
    """
    _check("tokens", 0 < num_tokens <= MOST_TOKENS)
    for op, field, of, _ in program.places:
        start, count = int(ops[op, field]), numbers_at(program.ops[op]).get(field, 0)
        count *= 1 if isinstance(of, int) else num_tokens
        if own := memory.get(of):
            last = own.data_ptr() + own.nbytes() - count * program.dtype.itemsize
            _check(f"field {field} of operation {op}", own.data_ptr() <= start <= last)
        else:
            _check(f"the address of {of}", start != 0 or not count)
    for op, values in enumerate(ops):
        _check(f"scratch of operation {op}", _scratch(values, num_tokens) <= floats)


def _scratch(op: np.ndarray, num_tokens: int) -> int:
    """Return the float32 numbers that a thread writes during an operation."""
    kind = op[fields.KIND]
    if kind in (fields.LINEAR, fields.GATED):
        return int(op[fields.PIECE]) * num_tokens * (2 if kind == fields.GATED else 1)
    if kind != fields.ATTEND:
        return 2 * int(op[fields.SIZE])
    plan = _longs(op[fields.PLAN], fields.PLAN_FIELDS)
    size = int(plan[fields.NUM_SEGMENTS]) * fields.SEGMENT_FIELDS
    counts = _longs(plan[fields.SEGMENTS], size)[fields.COUNT :: fields.SEGMENT_FIELDS]
    _check("tokens of a plan", int(counts.sum()) == num_tokens)
    return int(counts.max() * (plan[fields.PITCH] + op[fields.SIZE])) + 64


def _longs(address: int, count: int) -> np.ndarray:
    """Return int64 numbers at an address."""
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(int(address)))


def _check(what: str, fits: bool) -> None:
    if not fits:
        raise IndexError(f"the kernels would read or write outside of their room: {what}")

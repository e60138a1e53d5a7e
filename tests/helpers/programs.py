"""Single operations of the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.fields import bits
from lookahead_hf.engines.cpu.kernels.program import JobRunner, Part, Plan, segment_of


def workspace(operations: list[dict[int, int]], dtype: torch.dtype) -> JobRunner:
    """A workspace of operations, given by the values of their fields."""
    ops = np.zeros((len(operations), fields.OP_FIELDS), np.int64)
    for at, values in enumerate(operations):
        ops[at, list(values)] = list(values.values())
    return JobRunner(ops, dtype)


def run(operations: list[dict[int, int]], dtype: torch.dtype, num_tokens: int) -> None:
    """Carry out operations."""
    workspace(operations, dtype).run(0, len(operations), num_tokens, 1 << 18)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, **given: int) -> torch.Tensor:
    """Multiply `x`, [tokens, in], by a weight, [out, in], with the kernel."""
    out = x.new_full((len(x), len(weight)), 1 if given.get("MODE") == fields.ADD else torch.nan)
    run([multiplying(x, weight, out, bias, **given)], x.dtype, len(x))
    return out


def multiplying(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: Any = None, **given: int
) -> dict[int, int]:
    """Return the operation of `linear`, with further fields."""
    op = {
        fields.KIND: fields.LINEAR,
        fields.SOURCE: x.data_ptr(),
        fields.TARGET: out.data_ptr(),
        fields.WEIGHT: weight.data_ptr(),
        fields.BIAS: 0 if bias is None else bias.data_ptr(),
        fields.SIZE: weight.shape[1],
        fields.OUTPUTS: len(weight),
        fields.PIECE: 32,
        fields.FACTOR: bits(1.0),
    }
    return op | {getattr(fields, name): value for name, value in given.items()}


def attended(q: torch.Tensor, *others: Any, limit: float = 0.0) -> torch.Tensor:
    """Attend with the kernel; the arguments are those of `attention`."""
    op, plan, out = attention(q, *others, limit=limit)
    run([op], q.dtype, len(plan.slots))
    return out


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, limit: float = 0.0
) -> tuple[dict[int, int], Plan, torch.Tensor]:
    """Return the operation of attention, the plan that it refers to, and its target.

    Args:
        q: Queries, [rows, width, heads, dim].
        k: Keys, [rows, slots, shared, dim].
        v: Values, the same.
        part: What the tokens see.
        limit: Limit of the scores, 0 for none.
    """
    rows, width, heads, dim = q.shape
    out = torch.empty_like(q)
    plan = Plan(np.zeros(rows * width, np.int64), [part], segment_of(q.dtype, rows * width))
    op = {
        fields.KIND: fields.ATTEND,
        fields.SOURCE: q.data_ptr(),
        fields.TARGET: out.data_ptr(),
        fields.WEIGHT: k.data_ptr(),
        fields.WEIGHT_2: v.data_ptr(),
        fields.HEADS: heads,
        fields.SHARED: k.shape[2],
        fields.SIZE: dim,
        fields.PLAN: plan.address,
        fields.FACTOR: bits(dim**-0.5),
        fields.EPSILON: bits(limit),
    }
    return op, plan, out


def planned(
    parents: np.ndarray, lengths: np.ndarray, slots: int, window: int = 0
) -> tuple[np.ndarray, Part]:
    """What trees behind prefixes see, as a mask and as plans of attention are told.

    Args:
        parents: Index of each token's parent in its row, -1 for none, [rows, width].
        lengths: Slots of each row before its tree, [rows].
        slots: Slots of each row.
        window: Columns that a token sees, 0 for all.

    Returns:
        Whether a token sees a slot, [rows, width, slots] bool, and the same for `Plan`.
    """
    rows, width = parents.shape
    seen, columns = np.zeros((rows, width, slots), bool), np.zeros((rows, width), np.int64)
    for row, token in np.ndindex(rows, width):
        length, parent = lengths[row], parents[row, token]
        columns[row, token] = length if parent < 0 else columns[row, parent] + 1
        seen[row, token] = np.arange(slots) < length if parent < 0 else seen[row, parent]
        seen[row, token, length + token] = True
        if window:
            path = [*range(length), *(length + np.flatnonzero(seen[row, token, length:]))]
            seen[row, token, path[:-window]] = False
    nothing, every = np.zeros((0, 0), np.int64), np.tile(np.arange(slots), (rows, 1))
    near = (columns - window + 1, every) if window else (nothing, nothing)
    counts, firsts = np.full(rows, width, np.int64), np.arange(rows) * slots
    return seen, (parents, counts, lengths, columns, *near, firsts)


def tree_of(
    rows: int, width: int, slots: int, seed: int, window: int = 0
) -> tuple[np.ndarray, Part]:
    """What the tokens of random trees behind random prefixes see, as of `planned`."""
    random = np.random.default_rng(seed)
    parents = np.array([[random.integers(-1, at) for at in range(width)] for _ in range(rows)])
    return planned(parents, random.integers(0, slots - width + 1, rows), slots, window)

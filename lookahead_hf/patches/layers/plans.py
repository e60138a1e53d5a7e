"""Attention masks in the format of the compiled kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.kernels.cpu.program import Plan

_Part = tuple[np.ndarray, np.ndarray, np.ndarray]


def plan_of(mask: Any, group: SlotGroup, rows: int, width: int, flat: Any) -> Plan | None:
    """Return which slots the tokens of a block see, None if its mask does not say so.

    Args:
        mask: The mask that a layer gets, [rows, 1, width, visible] or None; for a flat block the
            stand-in for its masks.
        group: The layers of the cache that take it.
        rows: Rows of the block.
        width: Tokens per row.
        flat: The flat block, else None.
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
    return Plan(slots, parts)


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

"""What the tokens of a block see, in the terms of the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotGroup
from lookahead_hf.kernels.cpu.program import Plan


def plan_of(mask: Any, group: SlotGroup, rows: int, width: int, flat: Any) -> Plan | None:
    """Return what the tokens of a block see, None if its mask does not say so.

    Args:
        mask: The mask that a layer gets, [rows, 1, width, visible] or None; of a flat block what
            stands in for its masks.
        group: The layers of the cache that take it.
        rows: Rows of the block.
        width: Its tokens in each of them.
        flat: How the tokens of a flat block belong to the rows of the cache, else None.
    """
    block, capacity = group.block, group.capacity
    if block is None:
        return None
    if block.flat_slots is not None:
        slots = block.flat_slots.numpy()
    else:
        assert block.span is not None
        span = np.arange(block.span.start, block.span.stop)
        slots = (np.arange(rows)[:, None] * capacity + span).reshape(-1)
    if flat is not None:
        return Plan(slots, [_of_run(each, capacity) for each in flat.masks_of(mask)])
    seen = _seen(mask, rows, width, block.visible)
    if seen is None:
        return None
    counts, firsts = np.full(rows, width, np.int64), np.arange(rows) * capacity
    return Plan(slots, [(seen, counts, firsts)])


def _of_run(of_run: Any, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what the tokens of a run see, how many each row has, and where its slots begin."""
    run = of_run.run
    counts = run.counts.astype(np.int64)
    seen = _seen(of_run.mask, len(counts), run.width, of_run.visible)
    if seen is None:  # beginnings of texts: a token sees those before it
        seen = np.tri(run.width, of_run.visible, dtype=bool)[None].repeat(len(counts), 0)
    return seen, counts, np.arange(run.rows.start, run.rows.stop) * capacity


def _seen(mask: Any, rows: int, width: int, visible: int) -> np.ndarray | None:
    """Return whether tokens see slots, [rows, width, visible]; None if no mask says so."""
    if mask is None:
        return np.ones((rows, 1, visible), bool) if width == 1 else None
    if type(mask) is not torch.Tensor or mask.dim() != 4 or mask.shape[1] != 1:
        return None
    if mask.shape[2] != width or mask.shape[3] < visible:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    whole: np.ndarray = seen[:, 0, :, :visible].expand(rows, -1, -1).contiguous().numpy()
    return whole

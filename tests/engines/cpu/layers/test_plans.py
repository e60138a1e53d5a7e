"""Plans of attention, against the masks of the same blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.cache.slots import BlockPlaces
from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.program import Plan
from lookahead_hf.engines.cpu.workspace import plan_for
from lookahead_hf.runner.forward import ForwardContext
from tests.helpers.blocks import random_block
from tests.helpers.bounds import check_plan


def group_of(rows: int, capacity: int, **place: Any) -> Any:
    """A part of a cache, and where a block is written in it."""
    given = {"span": None, "slot_mapping": None, "visible": capacity} | place
    return SimpleNamespace(
        block=BlockPlaces(**given), capacity=capacity, dropped=np.zeros(rows, np.int64)
    )


def seen_by(plan: Plan, rows: int, width: int, capacity: int) -> np.ndarray:
    """Which slots of its row each token sees by a plan, [rows, width, capacity] bool."""
    seen = np.zeros((rows * width, capacity), bool)
    for segment in plan.segments:
        for token in range(segment[fields.FIRST], segment[fields.FIRST] + segment[fields.COUNT]):
            assert segment[fields.ROW_SLOT] == token // width * capacity
            seen[token, segment[fields.BEGIN] : segment[fields.END]] = True
            tail = plan.tails[plan._starts[token] : plan._starts[token + 1]]
            assert (np.diff(tail) > 0).all() and not seen[token, tail].any()
            seen[token, tail] = True
    assert plan.pitch >= seen.sum(1).max()
    return seen.reshape(rows, width, capacity)


@pytest.mark.parametrize("seed", range(30))
def test_plans_show_what_masks_show(seed: int) -> None:
    block, expected = random_block(seed)
    rows, width, visible = expected["all"].shape
    lengths = block.held["all"].lengths.numpy()
    slots = (np.arange(rows) * visible + lengths)[:, None] + np.arange(width)
    for name in expected:
        group = group_of(rows, visible, slot_mapping=torch.from_numpy(slots.ravel()))
        block.held = {kind: held._replace(group=group) for kind, held in block.held.items()}
        mask = block.make_masks(is_causal=False, lazy=True)[name]
        plan = plan_for(ForwardContext(block), mask, group, rows, width)
        assert plan is not None
        check_plan(plan, rows, visible)
        assert np.array_equal(seen_by(plan, rows, width, visible), expected[name])


def test_no_plan_of_another_mask_or_block() -> None:
    block, _ = random_block(2)
    rows, width = block.query.shape
    visible = block.held["all"].visible
    lengths = block.held["all"].lengths.numpy()
    slots = torch.from_numpy(
        ((np.arange(rows) * visible + lengths)[:, None] + np.arange(width)).ravel()
    )

    def planned(group: Any, rows: int = rows, change: Any = None) -> Plan | None:
        block.held = {kind: held._replace(group=group) for kind, held in block.held.items()}
        mask = block.make_masks(is_causal=False)["all"]
        given = mask if change is None else change(mask)
        return plan_for(ForwardContext(block), given, group, rows, width)

    assert planned(group_of(rows, visible, slot_mapping=slots)) is not None
    assert planned(group_of(rows, visible, slot_mapping=slots), change=torch.clone) is None
    assert planned(group_of(rows, visible, slot_mapping=slots), rows + 1) is None
    assert planned(group_of(rows, visible, slot_mapping=slots - slots.max() - 1)) is None
    assert planned(group_of(rows, visible, slot_mapping=slots + rows * visible)) is None
    assert planned(group_of(rows, visible, slot_mapping=slots[:-1])) is None
    assert planned(group_of(rows, int(lengths.max()), slot_mapping=slots)) is None
    no_block = group_of(rows, visible)
    no_block.block = None
    assert planned(no_block) is None

"""How many nodes to verify, with scripted costs and scripted drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.budget import (
    DUE_AFTER,
    FLAT_SIZES,
    KEPT_SAMPLES,
    SIZES,
    Budget,
    CostCurve,
    CostModel,
)
from lookahead_hf.drafting.ensemble import Ensemble, head
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.rows import Rows
from tests.helpers.drafts import Fixed, FixedRunner

Cost = Callable[[int], float]

# Measured on a 135M model on two CPU cores, milliseconds by nodes.
BF16 = {0: 21, 1: 21, 3: 21, 7: 23, 15: 27, 31: 35, 63: 50}
FP32 = {0: 39, 1: 63, 3: 79, 7: 59, 15: 72, 31: 100, 63: 160}

SCORES = np.concatenate([[0.55, 0.3, 0.2, 0.15], 0.1 * 0.95 ** np.arange(60)])
"""How far a fair draft's chain is promised to go: 1.2 tokens with 4 nodes, 3.1 with 64."""


def points(costs: dict[int, int]) -> Cost:
    return lambda n: float(np.interp(n, list(costs), list(costs.values()))) / 1000


def steep(n: int) -> float:
    return 0.02 * (1 + n)


NO_LOGITS = torch.empty(0)


class Chains(Fixed):
    """Drafts a chain per row, of which each depth is a bucket with a promise of its own."""

    def __init__(self, scores: np.ndarray) -> None:
        super().__init__(*scores[:1], *scores[1:] / scores[:-1])

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        count = min(max_nodes, self.traits.buckets)
        tree = tree_of(np.ones(count), rows.num_rows)
        return tree.with_buckets(np.tile(np.arange(count), rows.num_rows))


@dataclass
class Run:
    """What a simulated call did."""

    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)


def tree_of(scores: np.ndarray, num_rows: int = 1) -> DraftTree:
    """Chains of the tokens 1, 2, ... that promise `scores`."""
    count = len(scores)
    tree = DraftTree.from_chains([[list(range(1, count + 1))]] * num_rows)
    return replace(tree, score=np.tile(scores.astype(np.float32), num_rows))


def verdict_of(accepted: list[int], right: list[int] | None = None) -> Verdict:
    """Rows accept so many nodes of their chains; `right` is how many a longer chain had got."""
    emitted = [
        [*range(1, count + 1), count + 1 if correct > count else 0]
        for count, correct in zip(accepted, right or accepted, strict=True)
    ]
    return Verdict.from_rows(emitted, [range(count) for count in accepted])


def rows_of(num_rows: int = 1, length: int = 100) -> Rows:
    rows = Rows(np.zeros((num_rows, length), np.int64))
    for row in range(num_rows):
        rows.emit(row, 0)
    return rows


Noise = Callable[[np.random.Generator], float]


def quiet(rng: np.random.Generator) -> float:
    return 1.0


def unsteady(rng: np.random.Generator) -> float:
    return float(1 + 0.05 * abs(rng.normal()) + 0.25 * (rng.random() < 0.05))


def simulate(
    cost: Cost,
    *,
    accepts: Callable[[int], float] = lambda step: 1.0,
    scores: np.ndarray = SCORES,
    costs: CostModel | None = None,
    steps: int = 256,
    noise: Noise = quiet,
    num_rows: int = 1,
    setting: str | int = "auto",
    seed: int = 0,
) -> Run:
    """Decode: drafts promise `scores` at first and keep the share `accepts(step)` of that."""
    rng, run, rows = np.random.default_rng(seed), Run(), rows_of(num_rows)
    budget = Budget(setting, 64, costs or CostModel(), rows, FixedRunner())
    source = Chains(scores)
    ensemble = Ensemble([source], Calibration([source]), num_rows)
    for step in range(steps):
        tree = ensemble.propose(rows, budget.most_nodes)
        draft = head(tree, budget.choose(tree))
        right = (rng.random(num_rows)[:, None] < accepts(step) * scores).sum(1)
        accepted = np.minimum(right, draft.max_nodes).tolist()
        verdict = verdict_of(accepted, right.tolist())
        for row in range(num_rows):
            for token in verdict.emitted(row).tolist():
                rows.emit(row, token)
        ensemble.observe(rows, draft, verdict, NO_LOGITS)
        budget.observe(draft, cost(draft.max_nodes) * noise(rng))
        run.seconds += cost(draft.max_nodes)
        run.sizes.append(draft.max_nodes)
    return run


SEEDS = range(3)  # Seeds over which a simulation is averaged: one call shows too much of its luck


def plain_seconds(curve: CostCurve) -> float:
    """The estimate of a step without a draft."""
    return float(curve.seconds(np.zeros(1))[0])


def test_a_flat_block_takes_the_likeliest_nodes_of_all_rows() -> None:
    rows, costs = rows_of(4), CostModel()
    rows.end(3)
    budget = Budget("auto", 64, costs, rows, FixedRunner(is_packed=True))
    curve = costs.curve(3, 101, is_packed=True)
    for size in FLAT_SIZES:
        curve.observe(size, 0.7 + 0.1 * size)
    scores = [0.9 ** np.arange(1, 8), np.array([0.5, 0.1]), np.zeros(0), np.zeros(0)]
    tree = DraftTree.from_chains([[list(range(len(each)))] for each in scores])
    tree = replace(tree, score=np.concatenate(scores).astype(np.float32))
    # A node pays if it brings a tenth of the 3 tokens that a plain step brings, and more later on.
    assert budget.choose(tree).tolist() == [7, 1, 0, 0]
    assert head(tree, budget.choose(tree)).row_offsets.tolist() == [0, 7, 8, 8, 8]


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_static_batch_drafts_for_the_row_that_ends_last(is_packed: bool) -> None:
    rows, costs = rows_of(2), CostModel()
    for token in range(40):
        rows.emit(1, token)  # the other row is far behind
    curve, plain = costs.curve(2, 141, is_packed=is_packed), 2 if is_packed else 0
    for size in curve.sizes:
        curve.observe(size, 1.0 + 0.12 * (size - plain))
    scores = np.array([0.5, 0.2, 0.1, 0.6, 0.4, 0.3])
    tree = replace(DraftTree.from_chains([[[1, 2, 3]], [[4, 5, 6]]]), score=scores)
    chosen = [
        Budget("auto", 64, costs, rows, FixedRunner(is_packed=is_packed), num_new=num_new)
        .choose(tree)
        .tolist()
        for num_new in (None, 64)
    ]
    refilled, static = chosen
    if is_packed:
        assert refilled == [1, 3] and static == [1, 0]
    else:  # all rows draft equally much
        assert refilled == [3, 3] and static == [1, 1]


def test_flat_blocks_learn_what_their_tokens_cost_together() -> None:
    rows, costs = rows_of(3), CostModel()
    budget = Budget("auto", 64, costs, rows, FixedRunner(is_packed=True))
    budget.observe(DraftTree.empty(3), 9.0)
    draft = head(tree_of(np.full(4, 0.5), 3), np.array([4, 0, 2]))
    budget.observe(draft, 2.0)
    assert not costs.curve(3, 101, is_packed=True).is_due(9)
    for row in range(2):
        rows.end(row)
    budget.observe(DraftTree.empty(3), 1.0)  # of the step in which they ended
    budget.observe(head(tree_of(np.full(4, 0.5), 3), np.array([0, 0, 2])), 1.5)
    three, one = (costs.curve(count, 101, is_packed=True) for count in (3, 1))
    assert not three.is_due(3) and three.is_due(5)
    assert one.is_due(1) and not one.is_due(3)


@pytest.mark.parametrize("cost", [points(BF16), points(FP32), steep])
def test_worthless_drafts_cost_next_to_nothing(cost: Cost) -> None:
    losses = []
    for seed in SEEDS:
        given: Any = {"noise": unsteady, "seed": seed, "costs": CostModel()}
        runs = [simulate(cost, accepts=lambda step: 0.0, **given) for _ in range(2)]
        end = np.mean([cost(n) for n in runs[1].sizes[-64:]])
        losses.append([*(run.seconds / len(run.sizes) for run in runs), end])
    first, later, end = np.mean(losses, 0) / cost(0)
    # The first call of a model also finds out what sizes cost; a step's cost per node is the worst.
    assert first < (1.12 if cost is not steep else 1.6)
    assert later < 1.07
    assert end < 1.03


def test_the_plain_step_is_measured_where_least_is_lost() -> None:
    costs = CostModel()
    budget, sizes = Budget("auto", 64, costs, rows_of(), FixedRunner()), []
    copying, other = 0.9 ** np.arange(1, 9), np.array([0.3, 0.1])
    for scores in [copying] * 4 + [other] + [copying] * 50:
        draft = head(tree_of(scores), budget.choose(tree_of(scores)))
        sizes.append(draft.max_nodes)
        budget.observe(draft, points(BF16)(draft.max_nodes))
    assert sizes[:6] == [8, 8, 8, 8, 0, 8]
    assert sizes.count(0) == 2, "a text that copies all the time is interrupted in the end"


def test_drafting_that_failed_starts_again_when_the_text_allows_it() -> None:
    cost = points(BF16)

    def accepts(step: int) -> float:
        return float(not 100 <= step < 250)

    sizes = np.array(
        [simulate(cost, accepts=accepts, steps=700, noise=unsteady, seed=s).sizes for s in SEEDS]
    )
    assert (sizes[:, 50:100] > 0).mean() > 0.8
    assert np.mean([cost(n) for n in sizes[:, 200:250].ravel().tolist()]) < 1.3 * cost(0)
    assert (sizes[:, -200:] > 0).mean() > 0.8


def test_costs_that_were_measured_too_dear_are_doubted() -> None:
    costs = CostModel()
    curve = costs.curve(1, 100)
    for _ in range(KEPT_SAMPLES):
        curve.observe(0, 0.02)
        for size in SIZES[1:9]:
            curve.observe(size, 0.04)  # disturbed; in truth they cost what a plain step costs
    sizes = []
    budget = Budget("auto", 8, costs, rows_of(), FixedRunner())
    for _ in range(2 * DUE_AFTER * KEPT_SAMPLES):
        tree = tree_of(np.full(8, 0.5) ** np.arange(1, 9))
        draft = head(tree, budget.choose(tree))
        sizes.append(draft.max_nodes)
        budget.observe(draft, 0.02)
    assert np.mean(np.array(sizes[-DUE_AFTER:]) > 0) > 0.8


def test_a_step_that_was_disturbed_costs_no_more_than_a_larger_one() -> None:
    curve = CostModel().curve(4, 100, is_packed=True)
    for size, seconds in ((4, 0.032), (16, 0.068), (24, 0.038), (64, 0.065)):
        curve.observe(size, seconds)
    costs = curve.seconds(np.array([4, 16, 24, 64]))
    np.testing.assert_allclose(costs, [0.032, 0.038, 0.038, 0.065])


@pytest.mark.parametrize("sizes", [(0, 7, 15, 31, 63), (0, 15, 63), (0, 1, 3, 7)])
def test_a_padded_step_is_filled_with_nodes(sizes: tuple[int, ...]) -> None:
    """Nodes up to the width that is paid for cost nothing."""
    costs = CostModel()
    budget, chosen = Budget("auto", 64, costs, rows_of(), FixedRunner(sizes=sizes)), set()
    for step in range(400):
        most = (64, 20)[step % 2]
        tree = tree_of(np.full(most, 0.9) ** np.arange(1, 1 + most))
        (size,) = budget.choose(tree).tolist()
        assert size in (*sizes, most)
        chosen.add(size)
        paid = costs.curve(1, 100, sizes=sizes).size_for(size)
        budget.observe(head(tree, size), points(BF16)(paid))
    assert {0, max(sizes)} <= chosen


@pytest.mark.parametrize("size", [0, 5, 64])
def test_a_fixed_budget_drafts_that_much_in_every_step(size: int) -> None:
    run = simulate(steep, setting=size, accepts=lambda step: 0.0, steps=40)
    assert run.sizes == [size] * 40


@pytest.mark.parametrize("is_packed", [False, True])
def test_drawn_nodes_are_verified_whatever_they_promise(is_packed: bool) -> None:
    drawn = np.where(np.isin(np.arange(12), (0, 1, 6)), 0, -1)
    tree = replace(tree_of(np.zeros(6), 2), drawn=drawn)
    budget = Budget("auto", 64, CostModel(), rows_of(2), FixedRunner(is_packed=is_packed))
    assert budget.choose(tree).tolist() == [2, 1]
    assert budget.choose(replace(tree, drawn=None)).tolist() == [0, 0]


def test_lengths_have_curves_of_their_own_that_start_from_their_neighbours() -> None:
    costs = CostModel()
    short = costs.curve(1, 100)
    short.observe(0, 1.0)
    short.observe(8, 2.0)
    assert costs.curve(1, 127) is short
    longer = costs.curve(1, 1000)
    assert longer is not short
    assert plain_seconds(longer) == 1.0
    longer.observe(0, 2.0)
    assert plain_seconds(longer) == 2.0, "what was measured outweighs the neighbour at once"
    assert longer.seconds(np.array([8]))[0] == 4.0, "and scales what was not"
    assert plain_seconds(short) == 1.0
    assert costs.curve(2, 100).is_due(8) and costs.curve(1, 100, "other").is_due(8)

"""How many nodes to verify, with scripted costs and scripted drafts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from lookahead_hf.drafting.budget import FIRST_REST, PATIENCE, RECOVERY, Budget, Pace, Rest, Trust
from lookahead_hf.drafting.costs import KEPT_SAMPLES, SIZES, CostCurve, CostModel, size_for
from lookahead_hf.drafting.tree import head
from lookahead_hf.rows import Rows
from lookahead_hf.steps import DraftTree, Verdict

Cost = Callable[[int], float]

# Measured on a 135M model on two CPU cores, milliseconds by nodes.
BF16 = {0: 21, 1: 21, 3: 21, 7: 23, 15: 27, 31: 35, 63: 50}
FP32 = {0: 39, 1: 63, 3: 79, 7: 59, 15: 72, 31: 100, 63: 160}

SCORES = np.concatenate([[0.55, 0.3, 0.2, 0.15], 0.1 * 0.95 ** np.arange(60)])
"""What a fair draft promises: 1.2 accepted tokens with 4 nodes, 3.1 with 64."""


def points(costs: dict[int, int]) -> Cost:
    return lambda n: float(np.interp(n, list(costs), list(costs.values()))) / 1000


def flat(n: int) -> float:
    return 0.02


def stepped(n: int) -> float:
    return 0.02 * (1 + n // 17)


def steep(n: int) -> float:
    return 0.02 * (1 + n)


@dataclass
class Run:
    """What a simulated call did."""

    seconds: float = 0.0
    tokens: int = 0
    sizes: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def tree_of(scores: np.ndarray, num_rows: int = 1) -> DraftTree:
    count = len(scores)
    tree = DraftTree.from_rows([(list(range(count)), [-1] * count)] * num_rows)
    score = np.tile(scores.astype(np.float32), num_rows)
    return DraftTree(tree.row_offsets, tree.token_ids, tree.parents, tree.depth, score)


def verdict_of(accepted: list[int]) -> Verdict:
    offsets = np.cumsum([0, *accepted])
    emitted = np.cumsum([0, *(count + 1 for count in accepted)])
    live = np.ones(len(accepted), bool)
    path = np.zeros(offsets[-1], np.int32)
    return Verdict(emitted, np.ones(emitted[-1], np.int64), offsets, path, live, ~live)


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


def crowded(rng: np.random.Generator) -> float:
    """Other programs take most of the machine, now and then."""
    return float(np.exp(0.4 * rng.normal()) * (1 + 2 * (rng.random() < 0.15)))


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
    """Decode: drafts promise `scores` and keep the share `accepts(step)` of the promise."""
    rng, run, rows = np.random.default_rng(seed), Run(), rows_of(num_rows)
    budget = Budget(setting, 64, costs or CostModel(), rows)
    for step in range(steps):
        wanted, draft_seconds, draft = budget.wanted(), 0.0, DraftTree.empty(num_rows)
        if wanted:
            tree = tree_of(scores[:wanted], num_rows)
            draft, draft_seconds = head(tree, budget.choose(tree)), 1e-4
        expected = accepts(step) * float(draft.score.sum()) / num_rows
        verdict = verdict_of(rng.poisson(expected, num_rows).tolist())
        for row in range(num_rows):
            for token in verdict.emitted(row).tolist():
                rows.emit(row, token)
        budget.observe(draft, verdict, cost(draft.max_nodes) * noise(rng), draft_seconds)
        run.seconds += cost(draft.max_nodes) + draft_seconds
        run.tokens += len(verdict.token_ids)
        run.sizes.append(draft.max_nodes)
    return run


def ideal_rate(cost: Cost, num_rows: int = 1) -> float:
    return max(num_rows * (1 + SCORES[:n].sum()) / cost(n) for n in range(len(SCORES) + 1))


CURVES: dict[str, Cost] = {
    "flat": flat, "stepped": stepped, "bf16": points(BF16), "fp32": points(FP32)
}  # fmt: skip


@pytest.mark.parametrize("noise", [quiet, unsteady])
@pytest.mark.parametrize("curve", CURVES)
def test_a_model_that_is_known_decodes_nearly_as_fast_as_it_can(curve: str, noise: Noise) -> None:
    costs, cost = CostModel(), CURVES[curve]
    first = simulate(cost, costs=costs, noise=noise)
    later = [simulate(cost, costs=costs, noise=noise) for _ in range(2)]
    ideal = ideal_rate(cost)
    assert first.rate > 0.85 * ideal
    assert min(run.rate for run in later) > 0.88 * ideal
    assert first.rate > 1.3 / cost(0)


@pytest.mark.parametrize("curve", CURVES)
def test_a_crowded_machine_does_not_talk_it_out_of_drafting(curve: str) -> None:
    costs, cost = CostModel(), CURVES[curve]
    runs = [simulate(cost, costs=costs, noise=crowded, seed=seed) for seed in range(4)]
    assert np.mean([run.rate for run in runs]) > 0.8 * ideal_rate(cost)


def test_a_dear_size_does_not_hide_a_cheaper_larger_one() -> None:
    # 1 to 6 nodes cost more than 7: who looks only one size ahead never gets there.
    sizes = simulate(points(FP32), scores=np.full(8, 0.12)).sizes[-64:]
    assert np.median(sizes) == 8


def test_a_batch_has_one_size_and_counts_all_rows() -> None:
    def cost(n: int) -> float:
        return 0.02 * (1 + n / 8)

    run = simulate(cost, num_rows=4)
    assert run.rate > 0.85 * ideal_rate(cost, 4)
    assert 0 < np.median(run.sizes) < 16


@pytest.mark.parametrize("curve", [*CURVES, "steep"])
@pytest.mark.parametrize("promise", [1.0, 0.3])
def test_worthless_drafts_cost_next_to_nothing(curve: str, promise: float) -> None:
    cost, costs = CURVES.get(curve, steep), CostModel()
    runs = [
        simulate(
            cost, costs=costs, accepts=lambda step: 0.0, scores=promise * SCORES, noise=unsteady
        )
        for _ in range(2)
    ]
    first, later = [run.seconds / (len(run.sizes) * cost(0)) for run in runs]
    # The first call of a model also finds out what sizes cost; a step's cost per node is the worst.
    assert first < (1.035 if curve != "steep" else 1.06)
    assert later < 1.03
    assert runs[1].sizes[-64:].count(0) > 60


def test_nothing_is_asked_for_while_drafting_rests() -> None:
    rows = rows_of()
    budget = Budget("auto", 64, CostModel(), rows)
    asked = []
    for _ in range(4 * FIRST_REST):
        asked.append(budget.wanted())
        if asked[-1]:
            budget.choose(DraftTree.empty(1))
        budget.observe(DraftTree.empty(1), verdict_of([0]), 0.02, 0.001)
    # After the rest a single try, then twice the rest.
    expected = [64] * PATIENCE + [0] * FIRST_REST + [64] + [0] * (2 * FIRST_REST) + [64]
    assert asked[: len(expected)] == expected


def test_a_cheap_drafter_is_asked_on_and_taken_when_it_is_sure() -> None:
    """Nothing to copy for long, then a text to copy begins: the first such draft is taken."""
    rows, costs, taken = rows_of(), CostModel(), []
    budget = Budget("auto", 64, costs, rows)
    sure = np.full(8, 0.9) ** np.arange(1, 9)
    for step in range(120):
        assert budget.wanted() == 64
        tree = tree_of(sure) if step >= 100 else DraftTree.empty(1)
        taken.append(budget.choose(tree))
        draft = head(tree, taken[-1])
        accepted = round(float(draft.score.sum()))
        budget.observe(draft, verdict_of([accepted]), points(BF16)(taken[-1]), 1e-4)
    assert taken[100] > 0
    assert taken[110:].count(8) >= 8


def test_a_draft_that_failed_before_is_taken_in_a_rest_only_if_it_looks_very_good() -> None:
    rest_of_text = simulate(
        points(BF16), accepts=lambda step: 0.0, scores=np.full(8, 0.05), steps=200
    )
    assert rest_of_text.sizes[-50:].count(0) >= 48


def test_drafting_that_failed_starts_again_when_the_text_allows_it() -> None:
    run = simulate(
        points(BF16), accepts=lambda step: float(not 50 <= step < 150), steps=600, noise=unsteady
    )
    drafted = np.array(run.sizes) > 0
    assert drafted[:50].mean() > 0.8
    assert drafted[100:150].mean() < 0.3
    assert drafted[-200:].mean() > 0.8


def test_promises_that_are_not_kept_are_discounted() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    for _ in range(30):
        trust.observe(2.0, 1.0)
    assert trust.factor == pytest.approx(0.5, abs=0.05)
    for _ in range(60):
        trust.observe(2.0, 4.0)
    assert trust.factor == 1.0


def test_slow_drafting_is_noticed_even_if_every_promise_is_kept() -> None:
    pace = Pace()
    for _ in range(10):
        pace.observe(verdict_of([1]), seconds=0.045, plain_seconds=0.02)
    assert pace.is_behind
    for _ in range(20):
        pace.observe(verdict_of([2]), seconds=0.045, plain_seconds=0.02)
    assert not pace.is_behind


def length_of(rest: Rest) -> int:
    """Begin a rest and sit it out."""
    rest.begin(has_failed=True)
    steps = 0
    while rest.is_resting:
        rest.step()
        steps += 1
    return steps


def test_rests_grow_until_drafting_has_paid_for_a_while() -> None:
    rest = Rest()
    assert [length_of(rest) for _ in range(3)] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    for _ in range(RECOVERY):
        rest.note_outcome(pays=True)
    assert length_of(rest) == FIRST_REST


@pytest.mark.parametrize("size", [0, 5, 64])
def test_a_fixed_budget_drafts_that_much_in_every_step(size: int) -> None:
    run = simulate(steep, setting=size, accepts=lambda step: 0.0, steps=40)
    assert run.sizes == [size] * 40


def test_a_fixed_budget_is_bounded_by_the_draft() -> None:
    budget = Budget(32, 64, CostModel(), rows_of())
    assert budget.wanted() == 32
    assert budget.choose(tree_of(SCORES[:5])) == 5


def test_a_curve_lies_on_lines_between_what_was_measured() -> None:
    curve = CostCurve()
    curve.observe(0, 1.0)
    curve.observe(8, 2.0)
    curve.observe(16, 2.5)
    np.testing.assert_allclose(curve.seconds(np.array([0, 4, 8, 12, 16, 32])),
                               [1.0, 1.5, 2.0, 2.25, 2.5, 3.5])  # fmt: skip
    assert curve.plain_seconds == 1.0


def test_costs_never_fall_beyond_the_largest_measured_size() -> None:
    curve = CostCurve()
    curve.observe(4, 2.0)
    curve.observe(8, 1.0)
    assert curve.seconds(np.array([64]))[0] == 1.0


def test_single_disturbances_do_not_move_an_estimate() -> None:
    curve = CostCurve()
    for seconds in [1.0, 1.02, 5.0, 1.01, 0.99, 7.0, 1.0, 1.03, 4.0]:
        curve.observe(8, seconds)
    assert curve.seconds(np.array([8]))[0] == 1.0
    for _ in range(KEPT_SAMPLES):
        curve.observe(8, 2.0)
    assert curve.seconds(np.array([8]))[0] == 2.0


def test_lengths_have_curves_of_their_own_that_start_from_their_neighbours() -> None:
    costs = CostModel(capacity=3)
    short = costs.curve(1, 100)
    short.observe(0, 1.0)
    assert costs.curve(1, 127) is short
    longer = costs.curve(1, 1000)
    assert longer is not short
    assert longer.plain_seconds == 1.0
    longer.observe(0, 2.0)
    longer.observe(0, 2.0)
    longer.observe(0, 2.0)
    assert short.plain_seconds == 1.0
    assert costs.curve(2, 100).greatest_size == costs.curve(1, 100, "other").greatest_size == 0
    assert costs.curve(1, 100) is not short, "the longest unused curve is dropped"


def test_threads_share_a_curve() -> None:
    curve = CostCurve()

    def measure(size: int) -> None:
        for _ in range(200):
            curve.observe(size, 1.0 + size)

    threads = [threading.Thread(target=measure, args=(size,)) for size in SIZES[:8]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(curve.seconds(np.array(SIZES[:8])), 1.0 + np.array(SIZES[:8]))


def test_sizes_are_rounded_up() -> None:
    assert [size_for(n) for n in (0, 1, 3, 17, 64, 1000)] == [0, 1, 4, 24, 64, SIZES[-1]]

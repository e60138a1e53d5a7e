"""Which sources are asked: those that bring more than they take, by what only they bring."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead_hf.drafting.scheduler import PRICE, Scheduler

STEP = 0.02


def asked_of(
    costs: list[float],  # seconds of each source
    chances: list[list[float]],  # mean tokens that only it brings, by source and step
    may_rest: bool = True,
    seed: int = 0,
) -> np.ndarray:
    """Which sources were asked in each step, [steps, sources] bool."""
    rng, scheduler, asked = np.random.default_rng(seed), Scheduler(len(costs), may_rest), []
    for gains in zip(*chances, strict=True):
        scheduler.begin_step()
        asked.append(scheduler.asked)
        seconds = [cost * is_asked for cost, is_asked in zip(costs, scheduler.asked, strict=True)]
        alone = [
            int(rng.poisson(gain)) * is_asked
            for gain, is_asked in zip(gains, scheduler.asked, strict=True)
        ]
        scheduler.observe(seconds, alone, 1 + sum(alone), STEP)
    return np.array(asked)


def test_what_is_dear_and_brings_nothing_rests_ever_longer() -> None:
    asked = asked_of([1e-4, STEP], [[1.0] * 600, [0.0] * 600])
    assert asked[:, 0].all()
    times = np.flatnonzero(asked[:, 1])
    rests = np.diff(times) - 1
    assert 0 < len(times) < 16
    assert sorted(rests.tolist()) == rests.tolist() and rests.max() == pytest.approx(1 / PRICE)


def test_what_costs_next_to_nothing_is_always_asked() -> None:
    assert asked_of([1e-4, PRICE * STEP], [[1.0] * 400, [0.0] * 400]).all()
    assert asked_of([1e-4, 0.02 * STEP], [[1.0] * 400, [0.0] * 400]).all()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_dear_and_pays_is_asked_though_not_every_step_shows_it(seed: int) -> None:
    # It doubles the time of a step and brings 4 tokens to 2, in bursts.
    asked = asked_of([1e-4, STEP], [[1.0] * 400, [16.0, 0.0, 0.0, 0.0] * 100], seed=seed)
    assert asked[:, 0].all()
    assert asked[:, 1].mean() > 0.9


def test_a_source_that_is_right_again_is_asked_again() -> None:
    useless, useful = [0.0] * 150, [3.0] * 250
    asked = asked_of([1e-4, STEP], [[0.5] * 400, useless + useful])
    assert asked[20:150, 1].mean() < 0.1
    assert asked[-100:, 1].mean() > 0.9


def test_of_two_that_say_the_same_one_goes_on() -> None:
    scheduler, asked = Scheduler(3, True), []
    for _ in range(300):
        scheduler.begin_step()
        asked.append(scheduler.asked)
        first, second = scheduler.asked[1:]
        alone = [0, 3 * (first and not second), 3 * (second and not first)]
        scheduler.observe([1e-4, STEP * first, STEP * second], alone, 1 + 3, STEP)
    both = np.array(asked)[50:, 1:]
    assert both.any(1).all()
    assert both.all(1).mean() < 0.2


def test_a_source_that_drafts_alone_rests_as_well() -> None:
    asked = asked_of([STEP / 2], [[0.0] * 600])[:, 0]
    assert asked[:3].all()
    assert asked[-300:].sum() <= 3


def test_all_are_asked_where_none_may_rest() -> None:
    assert asked_of([1e-4, STEP], [[1.0] * 100, [0.0] * 100], may_rest=False).all()


def test_one_disturbed_step_makes_no_source_dear() -> None:
    scheduler = Scheduler(2, True)
    for step in range(60):
        scheduler.begin_step()
        assert all(scheduler.asked)
        seconds = [1e-4, 1e-4 if step != 20 else 50 * STEP]
        scheduler.observe(seconds, [0, 0], 1, STEP)

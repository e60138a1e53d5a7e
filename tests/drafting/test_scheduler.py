"""Which sources are asked: those that bring more than they take, by what only they bring."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead_hf.drafting.guard import LONGEST_REST, PRICE
from lookahead_hf.drafting.scheduler import Roster

STEP = 0.02


def asked_of(
    costs: list[float],  # seconds of each source
    chances: list[list[float]],  # mean tokens that only it brings, by source and step
    may_rest: bool = True,
    seed: int = 0,
) -> np.ndarray:
    """Which sources were asked in each step, [steps, sources] bool."""
    rng, roster, asked = np.random.default_rng(seed), Roster(len(costs), may_rest), []
    for gains in zip(*chances, strict=True):
        roster.begin_step(True)
        asked.append(roster.asked)
        seconds = [cost * is_asked for cost, is_asked in zip(costs, roster.asked, strict=True)]
        alone = [
            int(rng.poisson(gain)) * is_asked
            for gain, is_asked in zip(gains, roster.asked, strict=True)
        ]
        roster.observe(seconds, alone, 1e-5, 1 + sum(alone), STEP)
    return np.array(asked)


def test_what_is_dear_and_brings_nothing_rests_ever_longer() -> None:
    asked = asked_of([1e-4, STEP], [[1.0] * 600, [0.0] * 600])
    assert asked[:, 0].all()
    times = np.flatnonzero(asked[:, 1])
    rests = np.diff(times) - 1
    assert 0 < len(times) < 16
    assert sorted(rests.tolist()) == rests.tolist() and rests.max() == LONGEST_REST


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
    roster, asked = Roster(3, True), []
    for _ in range(300):
        roster.begin_step(True)
        asked.append(roster.asked)
        first, second = roster.asked[1:]
        alone = [0, 3 * (first and not second), 3 * (second and not first)]
        roster.observe([1e-4, STEP * first, STEP * second], alone, 0.0, 1 + 3, STEP)
    both = np.array(asked)[50:, 1:]
    assert both.any(1).all()
    assert both.all(1).mean() < 0.2


def test_the_last_one_never_rests_and_nobody_where_none_may() -> None:
    assert asked_of([STEP], [[0.0] * 100]).all()
    assert asked_of([STEP, STEP], [[0.0] * 100] * 2).any(1).all()
    assert asked_of([1e-4, STEP], [[1.0] * 100, [0.0] * 100], may_rest=False).all()


def test_one_disturbed_step_makes_no_source_dear() -> None:
    roster = Roster(2, True)
    for step in range(60):
        roster.begin_step(True)
        assert all(roster.asked)
        seconds = [1e-4, 1e-4 if step != 20 else 50 * STEP]
        roster.observe(seconds, [0, 0], 0.0, 1, STEP)


def test_what_drafting_takes_is_what_those_take_that_will_be_asked() -> None:
    roster = Roster(2, True)
    assert roster.seconds == 0.0
    while all(roster.next_asked):
        roster.begin_step(True)
        roster.observe([1e-4, STEP], [1, 0], 2e-5, 2, STEP)
        resting = not roster.next_asked[1]
        assert roster.seconds == pytest.approx(1.2e-4 + (0 if resting else STEP))
    roster.begin_step(False)
    assert roster.asked == [False, False]

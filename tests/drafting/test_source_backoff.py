"""Which sources are asked: those that bring more than they take, by what only they bring."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead_hf.drafting.rates import SourceBackoff

STEP = 0.02


def asked_of(
    costs: list[float],  # seconds of each source
    chances: list[list[float]],  # mean tokens that only it brings, by source and step
    seed: int = 0,
) -> np.ndarray:
    """Which sources were asked in each step, [steps, sources] bool."""
    rng, backoff, asked = np.random.default_rng(seed), SourceBackoff(len(costs), True), []
    for gains in zip(*chances, strict=True):
        backoff.begin_step()
        asked.append(backoff.asked)
        seconds = [cost * is_asked for cost, is_asked in zip(costs, backoff.asked, strict=True)]
        alone = [
            int(rng.poisson(gain)) * is_asked
            for gain, is_asked in zip(gains, backoff.asked, strict=True)
        ]
        backoff.observe(seconds, alone, 1 + sum(alone), STEP)
    return np.array(asked)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_dear_and_pays_is_asked_though_not_every_step_shows_it(seed: int) -> None:
    # It doubles the time of a step and brings 4 tokens to 2, in bursts.
    asked = asked_of([1e-4, STEP], [[1.0] * 400, [16.0, 0.0, 0.0, 0.0] * 100], seed=seed)
    assert asked[:, 0].all()
    assert asked[:, 1].mean() > 0.9


def test_after_a_disturbed_step_a_source_rests_once() -> None:
    backoff, asked = SourceBackoff(2, True), []
    for step in range(60):
        backoff.begin_step()
        asked.append(backoff.asked)
        seconds = [1e-4, 1e-4 if step != 20 else 50 * STEP]
        backoff.observe(seconds, [0, 0], 1, STEP)
    assert np.sum(asked, 0).tolist() == [60, 59]

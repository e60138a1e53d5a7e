"""The simulation of replicas: its clock, its queues and its deaths, by hand-made cases."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def replicas() -> Any:
    return importlib.import_module("replicas")


def test_a_step_takes_as_long_as_its_texts_are_many(replicas: Any) -> None:
    one, two = replicas.STEP + replicas.ROW, replicas.STEP + 2 * replicas.ROW
    assert replicas.seconds_of([]) == 0
    assert replicas.seconds_of([5]) == pytest.approx(5 * one)
    assert replicas.seconds_of([5, 3]) == pytest.approx(3 * two + 2 * one)
    full = replicas.STEP + replicas.SLOTS * replicas.ROW
    assert replicas.seconds_of([4] * 3 * replicas.SLOTS) == pytest.approx(3 * 4 * full)


def test_blocks_go_to_the_replica_that_has_room(replicas: Any) -> None:
    found = replicas.Cluster([1.0, 1.0], in_flight=1).run([5, 1, 1, 1])
    assert (found.end, [*found.ends], found.cost) == (5, [5, 3], 4)
    found = replicas.Cluster([1.0, 2.0], in_flight=1).run([1, 1, 1])
    assert [*found.ends] == [2, 2]
    # The third block waits for the first one, though the second replica has nothing to do.
    found = replicas.Cluster([1.0, 1.0], in_flight=2).run([5, 1, 1])
    assert [*found.ends] == [6, 1]


def test_blocks_of_a_dead_replica_are_run_again(replicas: Any) -> None:
    found = replicas.Cluster([1.0, 1.0], in_flight=1).run([4, 30, 2], death=3.0)
    assert [*found.ends] == [3 + replicas.START + 4 + 2, 30]


def test_a_fixed_split_does_where_replicas_are_equal(replicas: Any) -> None:
    def time(name: str, block: int | None) -> float:
        (scenario,) = [each for each in replicas.SCENARIOS if each.name == name]
        return float(replicas.job(scenario, block, replicas=8, rows=512, seed=0).end)

    in_turn = replicas.SPLITS["every 64th row each"]
    assert 1 < time("mixed", in_turn) < time("mixed", 64)
    assert time("4 slow", 64) < time("4 slow", in_turn)
    assert time("1 dies", 64) < time("1 dies", in_turn)


def test_queues_grow_with_the_load_and_with_sessions(replicas: Any) -> None:
    def wait(route: Any, load: float) -> float:
        return float(replicas.serve(route, load, replicas=8, sessions=160, requests=4000)[2])

    assert wait(replicas.of_two, 0.5) < wait(replicas.of_two, 0.8) < wait(replicas.of_session, 0.8)

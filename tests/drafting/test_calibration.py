"""Learning acceptance rates from verdicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lookahead_hf.draft import DraftTree, Evidence, Verdict
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.rates import MEMORY, Calibration, KeptRates
from lookahead_hf.drafting.sources.user import UserDrafter
from tests.helpers.drafts import Fixed


def source_of(name: str = "scripted", num_buckets: int = 3) -> Fixed:
    return Fixed(*[0.5] * num_buckets, name=name)


def draft(
    rows: list[tuple[list[int], list[int]]], entries: list[list[tuple[int, int]]]
) -> DraftTree:
    """A tree whose node i carries the (source, bucket) pairs `entries[i]`."""
    tree = DraftTree.from_rows(rows)
    flat = [entry for node in entries for entry in node]
    evidence = Evidence(
        np.cumsum([0, *map(len, entries)]),
        np.array([source for source, _ in flat], np.int32),
        np.array([bucket for _, bucket in flat], np.int32),
    )
    return replace(tree, evidence=evidence)


def verdict(*rows: tuple[list[int], list[int]]) -> Verdict:
    """From (path, emitted tokens) per row."""
    paths, emitted = zip(*rows, strict=True)
    return Verdict.from_rows(emitted, paths)


def gained(calibration: Calibration) -> list[tuple[float, float]]:
    return list(zip(*calibration.gained.tolist(), strict=True))


@pytest.mark.parametrize(
    ("parents", "path", "emitted", "expected"),
    [
        # 1 is right, 2 wrong; below 1: 3 wrong; below 2: 4 was never tested.
        ([-1, -1, 0, 1], [0], [1, 9], [(1, 1), (0, 1), (0, 1)]),
        # The text stops at token 2, which node 1 proposed: it stands for the bonus token.
        ([-1, 0, 1, 1], [0], [1, 2], [(1, 1), (1, 1), (0, 0)]),
    ],
)
def test_only_children_of_right_nodes_are_evidence(
    parents: list[int], path: list[int], emitted: list[int], expected: list[tuple[int, int]]
) -> None:
    calibration = Calibration([source_of()])
    tree = draft([([1, 2, 3, 4], parents)], [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 2)]])
    calibration.update(tree, verdict((path, emitted)))
    assert gained(calibration) == expected


def test_rates_follow_a_text_that_changes() -> None:
    calibration = Calibration([source_of()])
    tree = draft([([1], [-1])], [[(0, 0)]])
    for _ in range(3000):
        calibration.update(tree, verdict(([0], [1, 2])))
    assert calibration.rates[0] > 0.94
    assert calibration.counts[1, 0] <= MEMORY
    for _ in range(int(2 * MEMORY)):
        calibration.update(tree, verdict(([], [9])))
    assert calibration.rates[0] < 0.2


def learn(kept: KeptRates, *sources: Drafter, times: int = 1000) -> None:
    """A call in which the first bucket of every source is always right."""
    calibration = kept.lease(sources, do_sample=False)
    tree = draft([([1], [-1])], [[(index, 0) for index in range(len(sources))]])
    for _ in range(times):
        calibration.update(tree, verdict(([0], [1, 2])))
    kept.merge(calibration, sources, do_sample=False)


def test_calls_inherit_rates_but_can_outweigh_them() -> None:
    kept, source = KeptRates(), source_of()
    learn(kept, source)
    second = kept.lease([source], do_sample=False)
    assert second.rates[0] > 0.8
    assert second.counts[1, 0] == pytest.approx(MEMORY)
    assert second.gained.sum() == 0
    assert kept.lease([source], do_sample=True).rates[0] == 0.5


def test_drafters_of_two_classes_have_rates_of_their_own() -> None:
    class Namesake(Fixed):
        """Another one of the same name."""

    kept = KeptRates()
    learn(kept, source_of())
    namesake = Namesake(0.5, 0.5, 0.5, name="scripted")
    assert kept.lease([namesake], do_sample=False).rates[0] == 0.5
    assert kept.lease([source_of(num_buckets=4)], do_sample=False).rates[0] == 0.5
    first, second = UserDrafter(source_of()), UserDrafter(namesake)
    assert first.kept_as != second.kept_as
    learn(kept, first, second)
    assert kept.lease([UserDrafter(source_of())], do_sample=False).rates[0] > 0.8

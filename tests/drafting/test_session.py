"""Drafting during a call, with sources that take scripted time from a scripted clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting import drafter
from lookahead_hf.drafting.drafter import Drafter, Step, Traits
from lookahead_hf.drafting.session import DraftSession, Limits
from lookahead_hf.rows import Rows
from tests.helpers.drafts import FixedRunner, accepted_path

VOCAB = 1000


class Clock:
    """Time that passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(drafter, "perf_counter", clock)
    return clock


class Foreseeing(Drafter):
    """Takes its time and knows the next tokens as often as it is told."""

    def __init__(
        self,
        name: str,
        text: list[int],
        clock: Clock,
        seconds: float,
        right: Callable[[int], int],  # tokens that it foresees, by place in the text
        sees_all: bool = True,
    ) -> None:
        self.name, self.traits = name, Traits(sees_all=sees_all)  # type: ignore[misc]
        self.text, self.clock, self.seconds, self.right = text, clock, seconds, right
        self.asked: list[int] = []
        self.seen: list[int] = []

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self.clock.now += self.seconds
        at = int(rows.num_emitted[0])
        self.asked.append(at)
        known = self.text[at : at + self.right(at)]
        return DraftTree.from_chains([[[*known, VOCAB - 1]]])

    def observe(self, step: Step) -> None:
        self.seen.append(int(step.rows.num_emitted[0] - step.verdict.num_emitted[0]))


class MemoryHolder:
    """Stands in for a model: drafting keeps its memory between calls with it."""

    device, dtype = "cpu", "scripted"


def session_of(rows: Rows, *sources: Drafter, budget: str | int = 16) -> DraftSession:
    config, limits = SpeculativeConfig(budget=budget), Limits(False, VOCAB, 100_000)
    return DraftSession(MemoryHolder(), config, rows, list(sources), limits, FixedRunner())


def text_of(length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, VOCAB - 1, length).tolist()


def decode(text: list[int], clock: Clock, *sources: Drafter, budget: str | int = "auto") -> float:
    """Write the whole text, a step costing 20 ms and a bit for every node; the seconds it took."""
    start, unused = clock.now, torch.empty(1, 0, 0)
    rows = Rows(np.zeros((1, 4), np.int64))
    rows.emit(0, text[0])
    drafts = session_of(rows, *sources, budget=budget)
    drafts.begin(rows)
    at = 1
    while at < len(text):
        draft = drafts.propose(rows)
        path = accepted_path(draft, np.array(text[at:-1], np.int64))
        new = text[at : at + len(path) + 1]
        for token in new:
            rows.emit(0, token)
        drafts.prepare(SimpleNamespace(logits=unused))
        seconds = 0.02 * (1 + 0.005 * draft.max_nodes)
        clock.now += seconds
        drafts.observe(rows, draft, Verdict.from_rows([new], [path]), unused, seconds)
        at += len(new)
    drafts.end(rows)
    return clock.now - start


def cheap(text: list[int], clock: Clock) -> Foreseeing:
    """As n-grams in a text that copies: two tokens in every second step."""
    return Foreseeing("cheap", text, clock, 1e-4, lambda at: 2 * (at % 2))


@pytest.mark.parametrize("repeats", [False, True], ids=["useless", "repeats the others"])
def test_a_slow_source_that_brings_nothing_is_left(clock: Clock, repeats: bool) -> None:
    text = text_of(1500)
    alone, good = decode(text, clock, cheap(text, clock)), cheap(text, clock)
    slow = Foreseeing("slow", text, clock, 0.02, good.right if repeats else lambda at: 0)
    assert decode(text, clock, good, slow) < 1.05 * alone
    assert len(good.asked) > 600 and len(slow.asked) < 20
    rests = np.diff(slow.asked)
    assert rests[-1] > 100 > rests[0], "it is tried again, ever more seldom"


def test_a_slow_source_that_brings_more_is_asked_as_soon_as_it_does(clock: Clock) -> None:
    text = text_of(3000)
    good = cheap(text, clock)
    slow = Foreseeing("slow", text, clock, 0.02, lambda at: 8 if at > 1200 else 0)
    both = decode(text, clock, good, slow)
    assert both < 0.85 * decode(text, clock, cheap(text, clock))
    late = [at for at in slow.asked if at > 2000]
    assert len(late) > 80, "nine tokens in a step"


def test_a_fixed_budget_asks_everybody_in_every_step(clock: Clock) -> None:
    text = text_of(400)
    good, slow = cheap(text, clock), Foreseeing("slow", text, clock, 0.2, lambda at: 0)
    decode(text, clock, good, slow, budget=8)
    assert slow.asked == good.asked


def test_who_is_not_asked_is_shown_what_it_needs(clock: Clock) -> None:
    text = text_of(1500)
    good = cheap(text, clock)
    seeing = Foreseeing("seeing", text, clock, 0.02, lambda at: 0)
    passing = Foreseeing("passing", text, clock, 0.02, lambda at: 0, sees_all=False)
    decode(text, clock, good, seeing, passing)
    assert seeing.seen == good.seen
    assert len(passing.seen) < 40 < len(good.seen)
    steps = good.seen
    for at in passing.asked[1:]:  # the step before and its own, and no others
        assert steps[steps.index(at) - 1] in passing.seen and at in passing.seen
    assert len(passing.seen) <= 2 * len(passing.asked)

"""Simulate the control of drafting: real drafts on recorded texts, steps by scripted costs.

A session drafts as in a call, with the default sources and `budget="auto"`, while a clock of the
simulation counts what steps and sources would take. So a setting of the budget can be compared with
another without the noise of a machine. Tokens per second are given relative to plain decoding.

    python benchmarks/budget.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import common
import numpy as np
import torch
from call_replay import MemoryHolder, RecordedRecycling, Text, replay
from record import folder_of, recorded

from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting import drafter
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.sources.ngram import NgramDrafter
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.rows import Rows

# Milliseconds of a step by draft nodes: SmolLM2-135M on two CPU cores, and a flat curve as a GPU's.
COSTS = {
    "compiled fp32": {0: 19.0, 4: 23.1, 8: 28.4, 16: 34.9, 32: 48.5, 64: 76.0},
    "compiled bf16": {0: 14.9, 4: 18.1, 8: 21.6, 16: 26.9, 32: 38.4, 64: 62.0},
    "plain bf16": {0: 30.5, 4: 31.1, 8: 35.4, 16: 41.4, 32: 58.3, 64: 92.0},
    "plain fp32": {0: 42.0, 4: 67.8, 8: 79.7, 16: 93.9, 32: 123.0, 64: 180.0},
    "flat": {0: 10.0, 64: 12.0},
}
SOURCE_MS, DEAR_MS = 0.4, 20.0


class Clock:
    """Time of the simulation, in milliseconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now / 1e3


class TimedNgram(NgramDrafter):
    """n-grams that take time."""

    clock: Clock

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self.clock.now += SOURCE_MS
        return super().propose(rows, max_nodes)


class TimedRecycling(RecordedRecycling):
    """Recycling that takes time."""

    clock: Clock

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self.clock.now += SOURCE_MS
        return super().propose(rows, max_nodes)


class Dear(Drafter):
    """An assistant that takes a plain step's time and is right `chance` of the times."""

    name = "dear"

    def __init__(self, clock: Clock, text: Text, chance: float) -> None:
        self._clock, self._text, self._chance = clock, text, chance
        self._random = np.random.default_rng(len(text.prompt))

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        self._clock.now += DEAR_MS
        at = int(rows.num_emitted[0])
        right = np.cumprod(self._random.random(8) < self._chance).sum()
        return DraftTree.from_chains([[[*self._text.output[at : at + right].tolist(), 1]]])


@dataclass(frozen=True)
class Scene:
    """One setting of the simulation.

    Attributes:
        cost: Name of the curve of costs.
        noise: Factor of each step's time.
        cold: Whether every text is the first of its process.
        length: Tokens of each text.
        chance: How often a dear source is right; None without one.
    """

    cost: str
    noise: str = "quiet"
    cold: bool = False
    length: int = 128
    chance: float | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        parts = [self.cost, self.noise * (self.noise != "quiet"), "cold" * self.cold]
        parts += [] if self.chance is None else [f"dear {self.chance}"]
        return " ".join(filter(None, parts)) + (f" {self.length}" if self.length != 128 else "")


NOISES: dict[str, Callable[[np.random.Generator], float]] = {
    "quiet": lambda rng: 1.0,
    "unsteady": lambda rng: 1 + 0.05 * abs(rng.normal()) + 0.25 * (rng.random() < 0.05),
    "crowded": lambda rng: float(np.exp(0.4 * rng.normal()) * (1 + 2 * (rng.random() < 0.15))),
}

SCENES = [
    *(Scene(cost, "unsteady") for cost in COSTS),
    *(Scene(cost, "crowded") for cost in ("compiled bf16", "plain fp32", "flat")),
    *(Scene(cost, "unsteady", cold=True, length=64) for cost in COSTS),
    *(Scene(cost, "unsteady", chance=0.0) for cost in ("compiled bf16", "flat")),
    *(Scene(cost, "unsteady", chance=0.9) for cost in ("compiled bf16", "flat")),
]


def simulate(texts: Iterable[Text], scene: Scene, budget: str | int = "auto") -> float:
    """Tokens per second of all texts, relative to plain decoding."""
    rng, clock = np.random.default_rng(0), Clock()
    model, tokens, spent = MemoryHolder(), 0, 0.0
    plain = COSTS[scene.cost][0]
    with mock.patch.object(drafter, "perf_counter", clock):
        for text in texts:
            model = MemoryHolder() if scene.cold else model
            count, time = _decode(text, scene, budget, model, clock, rng)
            tokens, spent = tokens + count, spent + time
    return tokens * plain / spent


def _decode(
    text: Text, scene: Scene, budget: str | int, model: Any, clock: Clock, rng: np.random.Generator
) -> tuple[int, float]:
    """Tokens of a text and the milliseconds that it took without the noise."""
    curve, noise = COSTS[scene.cost], NOISES[scene.noise]
    ngram, recycling = TimedNgram(), TimedRecycling()
    ngram.clock = recycling.clock = clock
    sources: list[Drafter] = [ngram, recycling]
    if scene.chance is not None:
        sources.append(Dear(clock, text, scene.chance))
    before, factors = clock.now, itertools.chain([1.5], itertools.repeat(1.0))

    def step_seconds(num_nodes: int, length: int) -> float:
        cost = float(np.interp(num_nodes, list(curve), list(curve.values())))
        clock.now += cost
        return cost * noise(rng) * next(factors) / 1e3

    config = SpeculativeConfig(budget=budget)
    done = replay(text, model, config, sources, scene.length, step_seconds)
    return done.emitted, clock.now - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts-per-family", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = functools.cache(lambda: common.load(None, "float32", "cpu"))
    from lookahead_hf.utils import cache_root

    folder = folder_of(load()[0], cache_root() / "texts")
    texts = recorded(load, slice(8, 8 + arguments.prompts_per_family), 128, folder)
    compilation.wait([compilation.drafting])
    rates = [simulate(texts, scene) for scene in SCENES]
    for scene, rate in zip(SCENES, rates, strict=True):
        print(f"{scene.name:32} {rate:.3f}")
    print(f"{'mean':32} {math.exp(np.mean(np.log(rates))):.3f}")


if __name__ == "__main__":
    main()

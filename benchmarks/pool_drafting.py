"""Times the drafting of a step on one core: trees, and learning after a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pool_text import VOCABULARY

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step as VerifiedStep
from lookahead_hf.drafting.ensemble import Ensemble, head
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.drafting.sources.ngram import NgramDrafter
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.rows import Rows
from lookahead_hf.sources.pool import PoolDrafter

NODES = 64
VERIFIED = 16
"""Nodes whose logits a step learns from."""


@dataclass(frozen=True)
class Line:
    """One line of the result."""

    what: str
    size: int | None  # tokens of the context, or inserted tokens
    unit: str
    best: float
    median: float
    cold: float | None = None  # median of the cold calls


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Looks:
    """Times many look-ups of one kind."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self._other_memory = np.ones(64 << 20, np.uint8)

    def time(
        self,
        what: str,
        size: int,
        look: Callable[[], Any],
        advance: Callable[[], Any],
        calls: int = 3,
    ) -> Line:
        """Time `look` in many contexts, to which `advance` moves; the fastest of `calls` counts."""
        look()
        warm, cold = [], []
        for _ in range(self._num_looks):
            advance()
            warm.append(min(timed(look) for _ in range(calls)))
        for _ in range(min(self._num_looks, 100)):
            advance()
            self._other_memory.sum()
            cold.append(timed(look))
        return Line(
            what, size, "us", 1e6 * min(warm), 1e6 * float(np.median(warm)),
            1e6 * float(np.median(cold)),
        )  # fmt: skip


class Step:
    """A text that grows by one token per step, and the drafters that follow it."""

    def __init__(self, text: np.ndarray, size: int, sources: list[Any]) -> None:
        self._ids = text.astype(np.int64)
        self.rows = Rows(self._ids[None, : size - 1])
        self.ensemble = Ensemble(sources, Calibration(sources), 1, vocab_size=VOCABULARY)
        self._sources = sources
        self._draft, self._verdict = DraftTree.empty(1), self._emit()
        self._logits = torch.randn(1, 1 + VERIFIED, VOCABULARY).bfloat16()
        self.ensemble.begin(self.rows)
        _teach(self._ids[: size + 1_000], sources)

    def _emit(self) -> Verdict:
        token = self._ids[len(self.rows.context(0))]
        self.rows.emit(0, int(token))
        return Verdict.from_rows([[int(token)]], [[]])

    def advance(self) -> None:
        """Add the next token to the index of the text."""
        self._verdict = self._emit()
        self._sources[0].observe(VerifiedStep(self.rows, self._draft, self._verdict, self._logits))

    def propose(self) -> DraftTree:
        return self.ensemble.propose(self.rows, NODES)

    def draft(self) -> None:
        """Draft for a step, and emit its token."""
        self._draft = head(self.propose(), VERIFIED)
        self._verdict = self._emit()

    def observe(self) -> None:
        self.ensemble.observe(self.rows, self._draft, self._verdict, self._logits)


def trees(text: np.ndarray, size: int, pool: NgramPool, looks: Looks) -> Iterator[Line]:
    """Time trees of 64 nodes from `size` tokens on, and learning from 16 of them."""
    for names, with_pool in (("n-grams, recycling", []), ("and a pool", [PoolDrafter(pool)])):
        step = Step(text, size, [NgramDrafter(), RecyclingDrafter(), *with_pool])
        yield looks.time(f"propose: {names}", size, step.propose, step.advance)
    step.draft()
    yield looks.time("observe", size, step.observe, step.draft, calls=1)


def _teach(ids: np.ndarray, sources: list[Any]) -> None:
    """Teach logits in which the next token has rank 0 and random tokens follow."""
    rng = np.random.default_rng(0)
    top = rng.integers(0, VOCABULARY, (len(ids) - 1, 12)).astype(np.int32)
    top[:, 0] = ids[1:]
    probs = np.tile(0.5 ** np.arange(1.0, 13.0, dtype=np.float32), (len(top), 1))
    for source in sources:
        if isinstance(source, RecyclingDrafter):
            source._memory.remember(np.append(-1, ids[:-2]), ids[:-1], top, probs)

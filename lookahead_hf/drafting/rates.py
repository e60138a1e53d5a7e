"""Learns how often drafts are accepted, lets poor sources rest, and keeps rates between calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lookahead_hf import ngram_pool
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.budget import CostModel
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.model.state import kept

PRIOR_WEIGHT = 10.0  # Number of tests that a source's own estimate counts for

MEMORY = 100.0
"""Tests after which a bucket forgets as much as it learns, and most that later calls inherit."""


@dataclass(frozen=True, slots=True)
class LearnedRate:
    """The learned rate of one class of a source's proposals.

    Attributes:
        source: The source's name.
        sampled: Whether it was learned in calls that sample.
        bucket: The class, as the source numbers them.
        rate: How often such proposals are accepted, the source's own estimate included.
        tested: Number of tests, at most `MEMORY`; older ones count less.
    """

    source: str
    sampled: bool
    bucket: int
    rate: float
    tested: float


class Calibration:
    """Acceptance rates of all (source, bucket) pairs during one call.

    Each rate has a Beta prior around the source's own estimate. The emitted text updates it, also
    in steps without a draft. `counts`, [2, buckets], are accepted and tested with forgetting;
    `gained` counts this call alone, without forgetting.
    """

    def __init__(self, sources: Sequence[Drafter], kept: np.ndarray | None = None) -> None:
        """Start from the sources' priors and the counts that are kept of earlier calls."""
        self.bucket_starts = np.cumsum([0] + [s.traits.buckets for s in sources], dtype=np.int64)
        priors = [source.traits.prior for source in sources]
        self._prior = np.concatenate([np.empty(0, np.float32), *priors])
        self.counts = np.zeros((2, len(self._prior))) if kept is None else kept.copy()
        self.gained = np.zeros_like(self.counts)
        weight = self.counts[1] + PRIOR_WEIGHT
        rates = (self.counts[0] + PRIOR_WEIGHT * self._prior) / weight
        self.rates = rates.astype(np.float32)

    def update(self, merged: DraftTree, verdict: Verdict) -> None:
        """Learn from the verdict on a merged tree, including nodes that were not verified."""
        evidence = merged.evidence
        if evidence is None or not merged.num_nodes:
            return
        from lookahead_hf.drafting._numba import learn_rates, tested_nodes

        outcome = tested_nodes(
            merged.row_offsets, merged.token_ids, merged.parents,
            verdict.token_offsets, verdict.token_ids,
        )  # fmt: skip
        learn_rates(
            outcome, evidence.offsets, evidence.source, evidence.bucket, self.bucket_starts,
            self._prior, PRIOR_WEIGHT, MEMORY, self.counts, self.gained, self.rates,
        )  # fmt: skip

    def of_source(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return one source's live rates, its counts in this call, [2, buckets], and its priors."""
        part = slice(self.bucket_starts[index], self.bucket_starts[index + 1])
        return self.rates[part], self.gained[:, part], self._prior[part]


class KeptRates:
    """Learned rates of each source between the calls of one model.

    A call works on a copy and adds its counts at its end, so concurrent calls neither wait nor lose
    counts. Greedy and sampled calls are kept apart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Key, _Kept] = {}

    def lease(self, sources: Sequence[Drafter], do_sample: bool) -> Calibration:
        """Return a calibration for one call, starting from earlier calls."""
        keys = list(_keys(sources, do_sample))
        with self._lock:
            found = [self._kept.get(key) for key in keys]
        counts = [
            np.zeros((2, source.traits.buckets)) if kept is None else kept[0]
            for source, kept in zip(sources, found, strict=True)
        ]
        return Calibration(sources, kept=np.hstack([np.empty((2, 0)), *counts]))

    def merge(self, calibration: Calibration, sources: Sequence[Drafter], do_sample: bool) -> None:
        """Add the counts of a call, once, at its end."""
        keys = list(_keys(sources, do_sample))
        with self._lock:
            for index, key in enumerate(keys):
                _, gained, prior = calibration.of_source(index)
                kept = self._kept.pop(key, None)
                total = gained if kept is None else kept[0] + gained
                # The same rates from at most `MEMORY` tests.
                total = total * np.minimum(1.0, MEMORY / np.maximum(total[1], 1.0))
                self._kept[key] = total, prior

    def table(self) -> list[LearnedRate]:
        """Return all classes that were ever tested, the latest call's sources last."""
        with self._lock:
            kept = list(self._kept.items())
        return [row for key, (counts, prior) in kept for row in _learned(key, counts, prior)]


class _Key(NamedTuple):
    do_sample: bool
    name: str
    kept_as: str  # tells sources of one name apart, by default their class
    num_buckets: int


_Kept = tuple[np.ndarray, np.ndarray]
"""Accepted and tested, [2, buckets], and the source's own estimates, [buckets]."""


def _keys(sources: Sequence[Drafter], do_sample: bool) -> list[_Key]:
    return [
        _Key(do_sample, name, source.kept_as, source.traits.buckets)
        for name, source in zip(unique_names(sources), sources, strict=True)
    ]


def _learned(key: _Key, counts: np.ndarray, prior: np.ndarray) -> list[LearnedRate]:
    accepted, tested = counts
    rates = (accepted + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT)
    return [
        LearnedRate(key.name, key.do_sample, bucket, float(rates[bucket]), float(tested[bucket]))
        for bucket in np.flatnonzero(tested).tolist()
    ]


def unique_names(sources: Sequence[Drafter]) -> list[str]:
    """Return the sources' names, numbered from the second of a kind on: `custom`, `custom_2`."""
    names: list[str] = []
    for source in sources:
        same = sum(other.name == source.name for other in sources[: len(names)])
        names.append(f"{source.name}_{same + 1}" if same else source.name)
    return names


KEPT = 0.98
"""Share of a source's loss that a step leaves; what costs less than 3 % of a step never rests."""

DEBT, CREDIT = 1.5, 4.0
"""Loss, in steps' time, at which a source is paused; gain that it can save up."""

PRICE = 0.004  # Share of the time that retries of a paused source may take


class SourceBackoff:
    """Decides for every step which sources are `asked`, [sources] bool.

    A source is worth asking while its share of the tokens is at least its share of the time. Only
    accepted tokens that no other source proposed count for it. A source that loses too much is
    paused. The pause grows with its cost and with each failed retry. Sources are paused one at a
    time, since a pause changes what the others gain.
    """

    def __init__(self, num_sources: int, may_rest: bool) -> None:
        """Ask every source at first, and always unless they `may_rest`."""
        self._may_rest = may_rest
        self._lost = np.zeros(num_sources)  # in steps' worth of time
        self._left = np.zeros(num_sources, np.int64)  # steps to rest
        self._length = np.zeros(num_sources, np.int64)  # of the latest rest
        self._num_tokens = 0.0
        self.asked, self._skips = np.ones(num_sources, bool), False

    @property
    def next_asked(self) -> np.ndarray:
        """Sources that the next step would ask; none if this one skips all on purpose."""
        return (self._left == 0) & (not self._skips)

    def begin_step(self) -> bool:
        """Decide which sources the new step asks; return whether any is."""
        self._skips = False
        self.asked = self.next_asked
        self._left = np.maximum(0, self._left - 1)
        return bool(self.asked.any())

    def skip_step(self) -> None:
        self.asked, self._skips = np.zeros_like(self.asked), True

    def observe(
        self, seconds: Sequence[float], alone: Sequence[int], num_tokens: int, step_seconds: float
    ) -> None:
        """Learn from a step that took `step_seconds` without drafting.

        `seconds` is the time of each source, `alone` the accepted tokens that only it proposed.
        """
        if not (self._may_rest and num_tokens and step_seconds and self.asked.any()):
            return
        self._num_tokens = 0.9 * (self._num_tokens or num_tokens) + 0.1 * num_tokens
        price = np.array(seconds) / step_seconds
        worth = (1.0 + price.sum()) / self._num_tokens  # of a token, in steps
        lost = KEPT * self._lost + price - worth * np.array(alone)
        self._lost = np.where(self.asked, lost.clip(-CREDIT, DEBT), self._lost)
        fails = self.asked & (self._lost >= DEBT)
        self._length[self.asked & ~fails] = 0
        if fails.any():
            dearest = np.where(fails, price, -1.0).argmax()
            longest = max(1, round(price[dearest] / PRICE))
            length = min(max(1, 2 * self._length[dearest]), longest)
            self._length[dearest] = self._left[dearest] = length


OWN_POOL_TOKENS = 1_000_000

_lock = threading.Lock()


class ModelMemory:
    """The rates, costs, vocabularies and own pool of a model.

    Only the pool holds tokens, and it stays empty unless a call learns.
    """

    def __init__(self) -> None:
        self.rates, self.costs = KeptRates(), CostModel()
        self.vocabularies: dict[str, Any] = {}  # of the source "grammar"
        self._pool: ngram_pool.NgramPool | None = None

    def own_pool(self) -> ngram_pool.NgramPool:
        with _lock:
            self._pool = self._pool or ngram_pool.NgramPool(max_tokens=OWN_POOL_TOKENS)
            return self._pool


def memory_of(model: Any) -> ModelMemory:
    """Return what drafting keeps of a model between calls."""
    return kept(model, ModelMemory)


def placement(model: Any) -> str:
    """Return the device and dtype of a model, which change the cost of its steps."""
    return f"{model.device} {model.dtype}"

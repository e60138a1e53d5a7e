"""How often each class of a source's proposals is accepted, learned while decoding."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookahead_hf.drafting.compiled import functions
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.steps import DraftTree, Verdict

PRIOR_WEIGHT = 10.0
"""Tests that a source's own estimate of an acceptance rate is worth."""

MEMORY = 200.0
"""Tests after which a bucket forgets as much as it learns."""

KEPT_WEIGHT = 30.0
"""Most tests that a call inherits per bucket, so that its own text soon outweighs earlier ones."""


@dataclass(frozen=True, slots=True)
class RateRow:
    """One bucket as people read it."""

    source: str
    bucket: int
    rate: float
    tested: float


class Calibration:
    """Acceptance rates of all (source, bucket) pairs during one call.

    Each rate has a Beta prior around the source's own estimate. The emitted text updates it, also
    where nothing was verified: children of the last token and of nodes that were right were tested.

    Attributes:
        names: The sources, in the order in which evidence counts them.
        bucket_starts: First flat bucket of each source, [sources + 1] int64.
        rates: Acceptance rate of every flat bucket, [buckets] float32; each drafter's `rates` is a
            live view of its part.
        counts: Accepted and tested with forgetting, [2, buckets] float64.
        gained: The same of this call alone and without forgetting, [2, buckets] float64.
    """

    def __init__(
        self,
        sources: Sequence[Drafter],
        names: Sequence[str] | None = None,
        kept: np.ndarray | None = None,  # [2, buckets] float64
    ) -> None:
        """Take the sources' priors, and what earlier calls have kept of them."""
        self.names = tuple(names or unique_names(sources))
        self.bucket_starts = np.cumsum([0] + [s.num_buckets for s in sources], dtype=np.int64)
        priors = [np.asarray(source.prior(), np.float32) for source in sources]
        self._prior = np.concatenate([np.empty(0, np.float32), *priors])
        self.counts = np.zeros((2, len(self._prior))) if kept is None else kept.copy()
        self.gained = np.zeros_like(self.counts)
        weight = self.counts[1] + PRIOR_WEIGHT
        rates = (self.counts[0] + PRIOR_WEIGHT * self._prior) / weight
        self.rates = rates.astype(np.float32)
        for index, source in enumerate(sources):
            source.rates = self.rates[self.bucket_starts[index] : self.bucket_starts[index + 1]]

    def update(self, merged: DraftTree, verdict: Verdict) -> None:
        """Learn what became of a tree as `merge` returned it, also of nodes left unverified."""
        evidence = merged.evidence
        if evidence is None or not merged.num_nodes:
            return
        outcome = functions().tested_nodes(
            merged.row_offsets, merged.token_ids, merged.parents,
            verdict.token_offsets, verdict.token_ids,
        )  # fmt: skip
        functions().learn_rates(
            outcome, evidence.offsets, evidence.source, evidence.bucket, self.bucket_starts,
            self._prior, PRIOR_WEIGHT, MEMORY, self.counts, self.gained, self.rates,
        )  # fmt: skip

    def table(self) -> list[RateRow]:
        """Every bucket that was tested at least once."""
        return _table(self.names, self.bucket_starts, self.rates, self.counts[1])


class KeptRates:
    """What calls learned, kept between the calls of one model.

    A call works on a copy and hands its increments back at its end, so calls in several threads
    neither wait for each other nor lose what the other learned. Greedy and sampled texts accept
    differently and are kept apart; beyond `capacity` combinations the longest unused is dropped.
    """

    def __init__(self, capacity: int = 32) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[object, ...], np.ndarray] = OrderedDict()

    def lease(self, sources: Sequence[Drafter], do_sample: bool) -> Calibration:
        """A calibration for one call, starting from what earlier calls learned."""
        with self._lock:
            kept = self._kept.get(_key(sources, do_sample))
            kept = None if kept is None else _at_most(kept, KEPT_WEIGHT)
        return Calibration(sources, kept=kept)

    def merge(self, calibration: Calibration, sources: Sequence[Drafter], do_sample: bool) -> None:
        """Add what a call learned; call it once, at the end."""
        key = _key(sources, do_sample)
        with self._lock:
            kept = self._kept.pop(key, None)
            total = calibration.gained if kept is None else kept + calibration.gained
            self._kept[key] = _at_most(total, MEMORY)
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)


def unique_names(sources: Sequence[Drafter]) -> list[str]:
    """The sources' names, numbered from the second of a kind on: `custom`, `custom_2`."""
    names: list[str] = []
    for source in sources:
        same = sum(other.name == source.name for other in sources[: len(names)])
        names.append(f"{source.name}_{same + 1}" if same else source.name)
    return names


def _key(sources: Sequence[Drafter], do_sample: bool) -> tuple[object, ...]:
    return (do_sample, *((source.name, source.num_buckets) for source in sources))


def _at_most(counts: np.ndarray, weight: float) -> np.ndarray:
    """Counts [2, buckets] with the same rates and at most `weight` tests each."""
    return counts * np.minimum(1.0, weight / np.maximum(counts[1], 1.0))


def _table(
    names: Sequence[str], starts: np.ndarray, rates: np.ndarray, tested: np.ndarray
) -> list[RateRow]:
    rows = []
    for index, name in enumerate(names):
        for flat in range(int(starts[index]), int(starts[index + 1])):
            if tested[flat] > 0:
                bucket = flat - int(starts[index])
                rows.append(RateRow(name, bucket, float(rates[flat]), float(tested[flat])))
    return rows

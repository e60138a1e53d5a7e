"""Counters of the server for Prometheus, under vLLM's names."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest

from lookahead_hf.stats import SpeculativeStats

PREFIX = "lookahead_hf:spec_decode_num_"


class Metrics:
    """Counts what all requests of one server drafted and accepted."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Any:
            return Counter(PREFIX + name, what, labels, registry=self._registry)

        self._drafts = counter("drafts", "Steps that verified a draft, in every row.")
        self._draft_tokens = counter("draft_tokens", "Draft tokens verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "accepted_tokens_per_pos", "Draft tokens accepted, by their place.", "position"
        )

    def count(self, stats: SpeculativeStats) -> None:
        """Add the statistics of one call of `generate`."""
        histogram = stats.accepted_histogram  # [most accepted in a step + 1]
        self._drafts.inc(stats.row_steps)
        self._draft_tokens.inc(stats.num_drafted)
        self._accepted.inc(stats.num_accepted)
        at_least = list(accumulate(reversed(histogram)))[::-1]  # steps that accepted k or more
        for position, count in enumerate(at_least[1:]):
            self._accepted_at.labels(position).inc(count)

    def text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

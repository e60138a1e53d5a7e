"""A progress bar for the requests of a run."""

from __future__ import annotations

import time

from transformers.utils.logging import tqdm

from lookahead_hf.stats import SpeculativeStats

EVERY_SECONDS = 0.2
"""Least time between two updates of the numbers beside the bar."""


class Progress:
    """Shows finished requests, tokens per second, live rows and tokens per step."""

    def __init__(self, num_requests: int | None) -> None:
        """`num_requests`: the total, None if it is not known."""
        self._bar = tqdm(total=num_requests, unit="request")
        self._begin = self._shown = time.perf_counter()
        self._tokens = self._emitted = self._steps = 0

    def emitted(self, num_tokens: int) -> None:
        """Count new tokens."""
        self._tokens += num_tokens

    def show(self, num_live: int) -> None:
        """Update the numbers beside the bar, at most every `EVERY_SECONDS`."""
        now = time.perf_counter()
        if now - self._shown < EVERY_SECONDS:
            return
        self._shown = now
        shown = f"{self._tokens / (now - self._begin):.0f} tokens/s, {num_live} live"
        if self._steps:
            shown += f", {self._emitted / self._steps:.2f} tokens per step"
        self._bar.set_postfix_str(shown)

    def finished(self, stats: SpeculativeStats | None) -> None:
        """Count a finished request, with its statistics unless it failed."""
        if stats is not None:
            self._emitted += stats.num_emitted - stats.rows
            self._steps += stats.row_steps
        self._bar.update()

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

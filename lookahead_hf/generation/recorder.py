"""Counts and times the steps of one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.stats import PHASES, RowStats, SourceStats, SpeculativeStats

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows
    from lookahead_hf.trace import Trace

_Part = TypeVar("_Part")


class StatsRecorder:
    """Counts and times the steps of one call.

    Attributes:
        step_seconds: Time of the latest step without the drafting.
        milliseconds: Time of each phase so far.
    """

    step_seconds = 0.0

    def __init__(self, num_rows: int) -> None:
        self._steps = 0
        self._moved = 0
        self._max_width = 0
        self.milliseconds = dict.fromkeys(PHASES, 0.0)
        self._before = 0.0
        self._row_steps = np.zeros(num_rows, np.int64)
        self._drafted = np.zeros(num_rows, np.int64)
        self._accepted = np.zeros(num_rows, np.int64)
        self._accepted_histogram: Counter[int] = Counter()
        self._budgets: Counter[int] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block or function as part of a phase, one of `PHASES`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[name] += (time.perf_counter() - start) * 1e3

    def timed(self, part: _Part, **phases: str) -> _Part:
        """Return a stand-in for a part of a call: the named methods, each timed as a phase."""
        methods = {name: self.phase(phase)(getattr(part, name)) for name, phase in phases.items()}
        return cast(_Part, SimpleNamespace(**methods))

    def leave_out_streaming(self, seconds: float) -> None:
        """Take off the verification what the caller's streamer spent in it."""
        self.milliseconds["verify"] -= seconds * 1e3

    def observe(self, draft: DraftTree, verdict: Verdict, num_moved: int = 0) -> None:
        """Count a step.

        Args:
            draft: What was verified.
            verdict: What was accepted.
            num_moved: Accepted tokens that the commit moved in the cache.
        """
        drafted, accepted = np.diff(draft.row_offsets), verdict.of_text.num_accepted
        self._steps += 1
        total = sum(self.milliseconds[name] for name in ("forward", "verify", "commit"))
        self.step_seconds = (total - self._before) / 1e3
        self._before = total
        self._moved += num_moved
        self._row_steps += verdict.live
        self._drafted += np.where(verdict.live, drafted, 0)
        self._accepted += accepted
        self._accepted_histogram.update(accepted[verdict.live].tolist())
        self._budgets[int(drafted.max(initial=0))] += 1
        self._max_width = max(self._max_width, int(widths(draft).max(initial=0)))

    def finish(
        self,
        rows: Rows,
        engine: str,
        per_source: dict[str, SourceStats],
        execution: str | None = None,
        trace: Trace | None = None,
        num_fed: int = 0,
    ) -> SpeculativeStats:
        """Return the record of the call.

        Args:
            rows: The texts.
            engine: How the call was verified.
            per_source: What each source contributed, by name.
            execution: How the steps were run.
            trace: What every step did.
            num_fed: Tokens that the target was fed.
        """
        per_row = (self._row_steps, rows.num_text, self._drafted, self._accepted)
        row_stats = [RowStats(*counts) for counts in np.stack(per_row, 1).tolist()]
        deepest = max(self._accepted_histogram, default=-1)
        times: dict[str, Any] = {f"{name}_ms": ms for name, ms in self.milliseconds.items()}
        return SpeculativeStats(
            rows=len(row_stats),
            num_steps=self._steps,
            row_steps=sum(row.row_steps for row in row_stats),
            num_emitted=sum(row.num_emitted for row in row_stats),
            num_drafted=sum(row.num_drafted for row in row_stats),
            num_accepted=sum(row.num_accepted for row in row_stats),
            num_moved=self._moved,
            accepted_histogram=tuple(self._accepted_histogram[k] for k in range(deepest + 1)),
            max_width=self._max_width,
            per_source=per_source,
            budget_histogram=dict(sorted(self._budgets.items())),
            engine=engine,
            execution=execution,
            num_fed=num_fed,
            row_stats=tuple(row_stats),
            trace=trace,
            **times,
        )


def widths(draft: DraftTree) -> np.ndarray:
    """Most nodes at one depth of each row, [rows] int64."""
    num_rows = len(draft.row_offsets) - 1
    if not draft.num_nodes:
        return np.zeros(num_rows, np.int64)
    row, levels = np.repeat(np.arange(num_rows), np.diff(draft.row_offsets)), draft.depth.max() + 1
    counts = np.bincount(row * levels + draft.depth, minlength=num_rows * levels)
    found: np.ndarray = counts.reshape(num_rows, levels).max(1)
    return found

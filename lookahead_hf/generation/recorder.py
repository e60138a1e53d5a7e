"""Counts and times the steps of one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.stats import PHASES, RowStats, SpeculativeStats

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows


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
        """Time a block, or every call of a function, as part of a phase, one of `PHASES`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[name] += (time.perf_counter() - start) * 1e3

    def leave_out_streaming(self, seconds: float) -> None:
        """Take off the verification what the caller's streamer spent in it."""
        self.milliseconds["verify"] -= seconds * 1e3

    def observe(self, draft: DraftTree, verdict: Verdict, num_moved: int = 0) -> None:
        """Count a step, whose commit moved `num_moved` accepted tokens in the cache."""
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

    def finish(self, rows: Rows, **others: Any) -> SpeculativeStats:
        """Return the record of the call; `others` are the fields that are not counted here."""
        per_row = (self._row_steps, rows.num_text, self._drafted, self._accepted)
        return record_of(
            [RowStats(*counts) for counts in np.stack(per_row, 1).tolist()],
            self.milliseconds,
            self._accepted_histogram,
            self._budgets,
            num_steps=self._steps,
            num_moved=self._moved,
            max_width=self._max_width,
            **others,
        )


def record_of(
    row_stats: Sequence[RowStats],
    milliseconds: Mapping[str, float],
    accepted: Counter[int],
    drafted: Counter[int],
    **others: Any,
) -> SpeculativeStats:
    """Return a record, whose totals are the sums over its rows.

    `accepted` counts row steps by accepted draft tokens, `drafted` steps by the largest draft.
    """
    totals: dict[str, Any] = {
        field.name: sum(getattr(row, field.name) for row in row_stats) for field in fields(RowStats)
    }
    times: dict[str, Any] = {f"{name}_ms": spent for name, spent in milliseconds.items()}
    return SpeculativeStats(
        rows=len(row_stats),
        accepted_histogram=tuple(accepted[k] for k in range(max(accepted, default=-1) + 1)),
        budget_histogram=dict(sorted(drafted.items())),
        row_stats=tuple(row_stats),
        **totals,
        **times,
        **others,
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

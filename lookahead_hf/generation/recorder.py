"""Counts and times the steps of one call, or of a run of requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict, place_in_row
from lookahead_hf.stats import RowStats, SpeculativeStats
from lookahead_hf.trace.steps import PARTS

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows


class StatsRecorder:
    """Counts the steps of every row, and times the phases of all rows together.

    Attributes:
        step_seconds: Time of the latest step without the drafting.
        milliseconds: Time of each phase so far.
    """

    step_seconds = 0.0

    def __init__(self, num_rows: int) -> None:
        self.milliseconds = dict.fromkeys(PARTS, 0.0)
        self._before = 0.0
        self._budgets = Counter[int]()
        self._counts = np.zeros((5, num_rows), np.int64)
        self._row_steps, self._drafted, self._accepted, self._moved, self._width = self._counts
        self._accepted_by_step = [Counter[int]() for _ in range(num_rows)]
        self._drafted_by_step = [Counter[int]() for _ in range(num_rows)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block, or every call of a function, as part of a phase, one of `PARTS`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[name] += (time.perf_counter() - start) * 1e3

    def leave_out_streaming(self, seconds: float) -> None:
        """Subtract the time of the caller's streamer from the verification."""
        self.milliseconds["verify"] -= seconds * 1e3

    def observe(self, draft: DraftTree, verdict: Verdict) -> None:
        """Count a step."""
        drafted, accepted = np.diff(draft.row_offsets), verdict.of_text.num_accepted
        total = sum(self.milliseconds[name] for name in ("forward", "verify", "commit"))
        self.step_seconds = (total - self._before) / 1e3
        self._before = total
        self._budgets[int(drafted.max(initial=0))] += 1
        self._row_steps += verdict.live
        self._drafted += np.where(verdict.live, drafted, 0)
        self._accepted += accepted
        self._moved += _num_moved(verdict)
        np.maximum(self._width, _widths(draft), out=self._width)
        for row in np.flatnonzero(verdict.live).tolist():
            self._accepted_by_step[row][int(accepted[row])] += 1
            self._drafted_by_step[row][int(drafted[row])] += 1

    def finish(self, rows: Rows, **others: Any) -> SpeculativeStats:
        """Return the record of the call; `others` are the fields that are not counted here."""
        counted = self._budgets, self.milliseconds
        return self._record(slice(None), rows.num_text, *counted, **others)

    def of_row(
        self, rows: Rows, row: int, milliseconds: Mapping[str, float], **others: Any
    ) -> SpeculativeStats:
        """Return the record of a row's text, which has taken this time in each phase."""
        counted = self._drafted_by_step[row], milliseconds
        return self._record(slice(row, row + 1), rows.num_text, *counted, **others)

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        self._counts[:, row] = 0
        self._accepted_by_step[row], self._drafted_by_step[row] = Counter(), Counter()

    def _record(
        self,
        chosen: slice,
        num_text: np.ndarray,  # [rows]
        drafted: Counter[int],
        milliseconds: Mapping[str, float],
        **others: Any,
    ) -> SpeculativeStats:
        """Return the record of the chosen rows; `drafted` counts steps by their largest draft."""
        per_row = np.stack((self._row_steps, num_text, self._drafted, self._accepted), 1)[chosen]
        steps, emitted, num_drafted, num_accepted = per_row.sum(0).tolist()
        accepted = sum(self._accepted_by_step[chosen], Counter[int]())
        times: dict[str, Any] = {f"{name}_ms": spent for name, spent in milliseconds.items()}
        return SpeculativeStats(
            rows=len(per_row),
            num_steps=drafted.total(),
            row_steps=steps,
            num_emitted=emitted,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_moved=int(self._moved[chosen].sum()),
            accepted_histogram=tuple(accepted[k] for k in range(max(accepted, default=-1) + 1)),
            max_width=int(self._width[chosen].max(initial=0)),
            budget_histogram=dict(sorted(drafted.items())),
            row_stats=tuple(RowStats(*counts) for counts in per_row.tolist()),
            **times,
            **others,
        )


def _num_moved(verdict: Verdict) -> np.ndarray:
    """Accepted tokens of each row that rejected nodes lie before, [rows] int64."""
    moved = verdict.path != place_in_row(verdict.path_offsets)
    return np.diff(np.concatenate([[0], moved.cumsum()])[verdict.path_offsets])


def _widths(draft: DraftTree) -> np.ndarray:
    """Most nodes at one depth of each row, [rows] int64."""
    num_rows = draft.num_rows
    if not draft.num_nodes:
        return np.zeros(num_rows, np.int64)
    row, levels = np.repeat(np.arange(num_rows), np.diff(draft.row_offsets)), draft.depth.max() + 1
    counts = np.bincount(row * levels + draft.depth, minlength=num_rows * levels)
    found: np.ndarray = counts.reshape(num_rows, levels).max(1)
    return found

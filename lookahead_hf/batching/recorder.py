"""Counts and times the steps of requests that come and go, for every request apart."""

from __future__ import annotations

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.stats import PHASES, RowStats, SpeculativeStats


class RowRecorder(StatsRecorder):
    """Gives every request statistics of its own; rows share the time of a step equally."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._histogram = np.zeros((num_rows, 1), np.int64)  # [rows, most accepted + 1]
        self._spent = np.zeros((num_rows, len(PHASES)))
        self._counted = np.zeros(len(PHASES))

    def observe(self, draft: DraftTree, verdict: Verdict, num_moved: int = 0) -> None:
        super().observe(draft, verdict, num_moved)
        accepted, live = verdict.num_accepted, verdict.live
        more = int(accepted.max(initial=0)) + 1 - self._histogram.shape[1]
        if more > 0:
            self._histogram = np.pad(self._histogram, ((0, 0), (0, more)))
        self._histogram[live, accepted[live]] += 1
        total = np.array([self.milliseconds[name] for name in PHASES])
        self._spent[live] += (total - self._counted) / max(1, int(live.sum()))
        self._counted = total

    def of_row(self, row: int, num_emitted: int) -> SpeculativeStats:
        """Return the statistics of the text that has ended in a row."""
        steps, drafted, accepted = (
            int(counts[row]) for counts in (self._row_steps, self._drafted, self._accepted)
        )
        histogram = self._histogram[row]
        times = dict(zip(PHASES, self._spent[row].tolist(), strict=True))
        return SpeculativeStats(
            rows=1,
            num_steps=steps,
            row_steps=steps,
            num_emitted=num_emitted,
            num_drafted=drafted,
            num_accepted=accepted,
            accepted_histogram=tuple(np.trim_zeros(histogram, "b").tolist()),
            engine="walk",
            row_stats=(RowStats(steps, num_emitted, drafted, accepted),),
            **{f"{name}_ms": spent for name, spent in times.items()},
        )

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        for counts in (self._row_steps, self._drafted, self._accepted):
            counts[row] = 0
        self._histogram[row], self._spent[row] = 0, 0.0

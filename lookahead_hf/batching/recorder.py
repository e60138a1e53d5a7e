"""Counts and times the steps of requests that come and go, for every request apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.stats import PHASES, RowStats, SourceStats, SpeculativeStats


class RowRecorder(StatsRecorder):
    """Gives every request statistics of its own; rows share the time of a step equally."""

    def __init__(self, num_rows: int, sources: Sequence[str]) -> None:
        """`sources`: names of the sources, in the order of the drafts' evidence."""
        super().__init__(num_rows)
        self._names = sources
        self._of_sources = np.zeros((num_rows, 3, len(sources)), np.int64)
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
        self._count_sources(draft, verdict.of_text)
        self._spent[live] += (total - self._counted) / max(1, int(live.sum()))
        self._counted = total

    def _count_sources(self, draft: DraftTree, verdict: Verdict) -> None:
        """Count what each source drafted, what was accepted, and what of that only it drafted."""
        if draft.evidence is None:
            return
        sizes, num_rows = np.diff(draft.evidence.offsets), len(draft.row_offsets) - 1
        row = np.repeat(np.arange(num_rows), np.diff(draft.row_offsets))
        drafted = np.zeros((draft.num_nodes, len(self._names)), bool)
        drafted[np.repeat(np.arange(len(sizes)), sizes), draft.evidence.source] = True
        hit = np.zeros((draft.num_nodes, 1), bool)
        row_of_path = np.repeat(np.arange(num_rows), np.diff(verdict.path_offsets))
        hit[draft.row_offsets[row_of_path] + verdict.path] = True
        alone = drafted.sum(1, keepdims=True) == 1
        found = np.stack([drafted, drafted & hit, drafted & hit & alone], 1)
        np.add.at(self._of_sources, row, found)

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
            per_source={
                name: SourceStats(*counts)
                for name, counts in zip(self._names, self._of_sources[row].T.tolist(), strict=True)
            },
            engine="walk",
            row_stats=(RowStats(steps, num_emitted, drafted, accepted),),
            **{f"{name}_ms": spent for name, spent in times.items()},
        )

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        for counts in (self._row_steps, self._drafted, self._accepted):
            counts[row] = 0
        self._histogram[row], self._spent[row], self._of_sources[row] = 0, 0.0, 0

"""Records what a call does: its statistics and, if asked for, its trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict, place_in_row
from lookahead_hf.rows import Rows
from lookahead_hf.stats import RowStats, SpeculativeStats
from lookahead_hf.trace import PARTS, Trace, TraceNode, TraceRow, TraceStep


class StatsRecorder:
    """Counts the steps of every row, and times the phases of all rows together."""

    step_seconds = 0.0  # time of the latest step without the drafting

    def __init__(self, num_rows: int) -> None:
        self.milliseconds = dict.fromkeys(PARTS, 0.0)  # time of each phase so far
        self._before = 0.0
        self._budgets = Counter[int]()
        self._counts = np.zeros((4, num_rows), np.int64)
        self._row_steps, self._drafted, self._accepted, self._moved = self._counts
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
        drafted, accepted = np.diff(draft.row_offsets), verdict.of_text.num_accepted
        spent = self.milliseconds
        total = spent["forward"] + spent["verify"] + spent["commit"]
        self.step_seconds = (total - self._before) / 1e3
        self._before = total
        self._budgets[int(drafted.max(initial=0))] += 1
        self._row_steps += verdict.live
        self._drafted += np.where(verdict.live, drafted, 0)
        self._accepted += accepted
        moved = verdict.path != place_in_row(verdict.path_offsets)  # behind rejected nodes
        self._moved += np.diff(np.concatenate([[0], moved.cumsum()])[verdict.path_offsets])
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
            budget_histogram=dict(sorted(drafted.items())),
            row_stats=tuple(RowStats(*counts) for counts in per_row.tolist()),
            **times,
            **others,
        )


OTHER_PROCESS = "another process"
"""The source of a draft from another process, which does not send its sources."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step as it was observed; `TraceStep`s are built at the end of the call."""

    draft: DraftTree
    verdict: Verdict  # without pads
    end_ms: float
    spent: dict[str, float]  # milliseconds of each phase since the beginning of the call


class Tracer:
    """Keeps the draft, the verdict and the times of every step of a call."""

    def __init__(self, spent: Mapping[str, float]) -> None:
        """`spent`: milliseconds of each phase so far; the call keeps it up to date."""
        self._spent = spent
        self._start = time.perf_counter()
        self._steps: list[_Step] = []

    def observe_prefill(self, rows: Rows) -> None:
        """Record the first token of every row."""
        emitted = [rows.emitted(row).tolist() for row in range(rows.num_rows)]
        verdict = Verdict.from_rows(emitted, [()] * rows.num_rows)
        self.observe(DraftTree.empty(rows.num_rows), verdict)

    def observe(self, draft: DraftTree, verdict: Verdict) -> None:
        """Record a step after its commit."""
        end_ms = (time.perf_counter() - self._start) * 1e3
        kept = replace(draft, probs=None)  # a distribution over the vocabulary for every node
        self._steps.append(_Step(kept, verdict.of_text, end_ms, dict(self._spent)))

    def finish(self, rows: Rows, sources: Sequence[str]) -> Trace:
        """Return the trace of texts, given the sources in the order of the drafts' evidence."""
        begins = np.zeros(rows.num_rows, np.int64)
        before, spent = 0.0, dict.fromkeys(self._spent, 0.0)
        steps = []
        for step in self._steps:
            ends = begins + step.verdict.num_emitted
            traced = [
                TraceRow(
                    row,
                    _nodes(step.draft, row, sources),
                    tuple(step.verdict.accepted(row).tolist()),
                    tuple(rows.emitted(row)[begins[row] : ends[row]].tolist()),
                )
                for row in np.flatnonzero(step.verdict.live).tolist()
            ]
            parts = {f"{name}_ms": step.spent[name] - spent[name] for name in spent}
            steps.append(TraceStep(tuple(traced), before, step.end_ms - before, **parts))
            begins, before, spent = ends, step.end_ms, step.spent
        return Trace(rows.num_rows, tuple(steps))


def _nodes(draft: DraftTree, row: int, sources: Sequence[str]) -> tuple[TraceNode, ...]:
    own, evidence = draft.row(row), draft.evidence
    fields = draft.token_ids[own], draft.parents[own], draft.depth[own]
    names, scores = [(OTHER_PROCESS,)] * len(fields[0]), [None] * len(fields[0])
    if evidence is not None:
        bounds = evidence.offsets[own.start : own.stop + 1].tolist()
        names = [
            # A source has an entry for every bucket of its own that the node is in.
            tuple(dict.fromkeys(sources[s] for s in evidence.source[begin:end].tolist()))
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]
        scores = np.round(draft.score[own].astype(np.float64), 4).tolist()
    nodes = zip(*(field.tolist() for field in fields), names, scores, strict=True)
    return tuple(TraceNode(*node) for node in nodes)

"""Collects the trace of one call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.trace import Trace, TraceNode, TraceRow, TraceStep

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
        """Return the trace of texts, which the caller's processors may have edited.

        `sources` names the sources in the order of the drafts' evidence.
        """
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
    """Return the nodes of a row."""
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

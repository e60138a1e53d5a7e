"""A trace as Chrome trace events, which Perfetto and chrome://tracing show on a time line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lookahead_hf.trace.steps import TraceStep

if TYPE_CHECKING:
    from lookahead_hf.trace import Trace

_TRACK = {"pid": 1, "tid": 1}


def events(trace: Trace) -> dict[str, Any]:
    """Return slices for the steps and, inside, for their parts, and counters of tokens.

    The length of each part is measured. Its place within the step is not: the parts are shown one
    after the other, although learning comes last and some of it runs beside the forward. Steps show
    their texts if the trace has any. All times are in microseconds.
    """
    process = {"name": "process_name", "ph": "M", **_TRACK, "args": {"name": "lookahead_hf"}}
    steps = [event for index, step in enumerate(trace.steps) for event in _of_step(index, step)]
    return {"traceEvents": [process, *steps], "displayTimeUnit": "ms"}


def _of_step(index: int, step: TraceStep) -> Iterator[dict[str, Any]]:
    counts = {
        "accepted tokens": sum(len(row.accepted) for row in step.rows),
        "draft tokens": sum(len(row.nodes) for row in step.rows),
    }
    texts = {f"row {row.row}": "".join(row.texts or ()) for row in step.rows}
    name = f"step {index}" if index else "first token"
    yield {**_slice(name, step.start_ms, step.total_ms), "args": {**counts, **texts}}
    at = step.start_ms
    for part, ms in step.parts.items():
        yield _slice(part, at, ms)
        at += ms
    for counter, count in counts.items():
        place = {"ph": "C", "ts": step.start_ms * 1e3, **_TRACK}
        yield {"name": counter, **place, "args": {counter: count}}


def _slice(name: str, start_ms: float, ms: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": start_ms * 1e3, "dur": ms * 1e3, **_TRACK}

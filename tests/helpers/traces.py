"""A trace agrees with the text and the statistics of its call."""

from __future__ import annotations

import pytest

from lookahead_hf import SpeculativeStats
from lookahead_hf.trace import MODEL, PARTS, TraceRow


def check_trace(stats: SpeculativeStats, texts: list[list[int]]) -> None:
    """Assert that a trace agrees with what its call emitted and counted.

    Args:
        stats: The statistics, with a trace.
        texts: The generated columns of each row, with pads.
    """
    trace = stats.trace
    assert trace is not None and trace.fallback_reason is None
    assert (trace.num_rows, len(trace.steps)) == (stats.rows, stats.num_steps + 1)
    for row, (counts, text) in enumerate(zip(stats.row_stats, texts, strict=True)):
        tokens, origins = trace.tokens(row), trace.origins(row)
        assert len(tokens) == counts.num_emitted
        # Without a pad token, the shortest row's columns are returned.
        assert tokens[: len(text)] == text[: len(tokens)]
        assert len(origins) - origins.count(MODEL) == counts.num_accepted
    traced = [each for step in trace.steps[1:] for each in step.rows]
    assert len(traced) == stats.row_steps
    assert sum(len(each.nodes) for each in traced) == stats.num_drafted
    for each in traced:
        check_row(each)
    for part in PARTS:
        spent = sum(step.parts.get(part, 0.0) for step in trace.steps)
        assert spent == pytest.approx(getattr(stats, f"{part}_ms"), abs=1e-6)
    ends = [step.start_ms + step.total_ms for step in trace.steps]
    assert [step.start_ms for step in trace.steps] == pytest.approx([0.0, *ends[:-1]])
    assert all(sum(step.parts.values()) <= step.total_ms + 1e-6 for step in trace.steps)


def check_row(each: TraceRow) -> None:
    """Assert that the accepted nodes are a path from the root whose tokens were emitted."""
    assert len(each.tokens) == len(each.accepted) + 1
    at = -1
    for index, token in zip(each.accepted, each.tokens, strict=False):
        node = each.nodes[index]
        assert (node.parent, node.token) == (at, token)
        at = index
    for index, node in enumerate(each.nodes):
        assert -1 <= node.parent < index
        above = 0 if node.parent == -1 else each.nodes[node.parent].depth
        assert node.depth == above + 1
        assert node.sources == ("scripted",)
        assert node.probability is not None and 0 <= node.probability <= 1

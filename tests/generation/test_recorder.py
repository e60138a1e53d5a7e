"""Traces, also of drafts that another process made."""

from __future__ import annotations

import numpy as np
import pytest

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import OTHER_PROCESS, Tracer
from lookahead_hf.rows import Rows
from lookahead_hf.trace import PARTS, Trace
from tests.helpers.models import prompt, tiny


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_trace_is_kept_where_it_is_asked_for(trace: bool, num_beams: int) -> None:
    """That of a fallback gives the reason alone."""
    config = SpeculativeConfig(trace=trace, on_fallback="silent")
    with lookahead_hf.enabled(tiny("llama")) as model:
        model.generate(prompt(), num_beams=num_beams, max_new_tokens=3, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and (stats.trace is not None) == trace
    assert (stats.to_dict()["trace"] is not None) == trace
    assert stats.fallback_reason == ("beams" if num_beams > 1 else None)
    if trace and num_beams > 1:
        assert stats.trace == Trace(fallback_reason="beams")


def test_a_draft_of_another_process_has_no_sources() -> None:
    rows, tracer = Rows(np.array([[5, 6]])), Tracer(dict.fromkeys(PARTS, 0.0))
    rows.emit(0, 7)
    tracer.observe(DraftTree.from_rows([([8], [-1])]), Verdict.from_rows([[7]], [[]]))
    ((node,),) = (row.nodes for row in tracer.finish(rows, ["ngram"]).steps[0].rows)
    assert node.sources == (OTHER_PROCESS,) and node.probability is None

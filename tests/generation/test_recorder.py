"""Traces of drafts that another process made."""

from __future__ import annotations

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import OTHER_PROCESS, Tracer
from lookahead_hf.rows import Rows
from lookahead_hf.trace import PARTS


def test_a_draft_of_another_process_has_no_sources() -> None:
    rows, tracer = Rows(np.array([[5, 6]])), Tracer(dict.fromkeys(PARTS, 0.0))
    rows.emit(0, 7)
    tracer.observe(DraftTree.from_rows([([8], [-1])]), Verdict.from_rows([[7]], [[]]))
    ((node,),) = (row.nodes for row in tracer.finish(rows, ["ngram"]).steps[0].rows)
    assert node.sources == (OTHER_PROCESS,) and node.probability is None

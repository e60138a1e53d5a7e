"""Drafting without a model."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.draft import Verdict
from lookahead_hf.drafting.calibration import Calibration
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.registry import Resources, build
from lookahead_hf.drafting.tree import head
from lookahead_hf.rows import Rows


def draft_two_steps() -> None:
    """Draft for two rows from all sources, as a call does."""
    sources = build(None, {}, Resources([np.array([1, 2, 3])] * 2))
    rows = Rows(np.tile(np.arange(6), (2, 2)), np.array([[False] + [True] * 11, [True] * 12]))
    for row in range(2):
        rows.emit(row, 0)
    ensemble = Ensemble(sources, Calibration(sources), vocab_size=50, max_new_tokens=9)
    ensemble.begin(rows)
    for _ in range(2):
        draft = head(ensemble.propose(rows, 8), 4)
        assert draft.num_nodes
        verdict = Verdict(
            np.array([0, 1, 2]), np.array([7, 8]), np.zeros(3, np.int64), np.empty(0, np.int32),
            np.array([True, True]), np.array([False, False]),
        )  # fmt: skip
        for row, token in enumerate((7, 8)):
            rows.emit(row, token)
        logits = torch.zeros(2, 1 + draft.max_nodes + 3, 60)[:, : 1 + draft.max_nodes, :50]
        ensemble.observe(rows, draft, verdict, logits)
    assert ensemble.working

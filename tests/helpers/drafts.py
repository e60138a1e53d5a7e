"""Rows, paths and verdicts for tests of drafters, and drafting without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lookahead_hf.call.prepared import Request
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter, Traits
from lookahead_hf.drafting.ensemble import Ensemble, head
from lookahead_hf.drafting.rates import Calibration
from lookahead_hf.drafting.registry import build
from lookahead_hf.rows import Rows


def accepted_path(draft: DraftTree, truth: np.ndarray) -> list[int]:
    """The accepted nodes of a one-row tree, root to leaf, where the target emits `truth`."""
    return [node for node, path in enumerate(paths(draft)) if path == truth[: len(path)].tolist()]


class FixedRunner(NamedTuple):
    """What budgets ask of a runner, for drafting without a model."""

    mode: str = ""
    sizes: tuple[int, ...] | None = None
    most_nodes: int | None = None
    is_packed: bool = False
    has_one_shape: bool = False


class Fixed(Drafter):
    """A source that only has acceptance rates, one per bucket."""

    def __init__(self, *rates: float, name: str = "fixed") -> None:
        self.name = name  # type: ignore[misc]
        self.traits = Traits(len(rates), rates)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        raise NotImplementedError


def rows_of(texts: Sequence[Sequence[int]], num_emitted: int = 1) -> Rows:
    """Rows with these texts, left-padded, whose last tokens were emitted."""
    width = max(map(len, texts)) - num_emitted
    ids, attended = np.zeros((2, len(texts), width), np.int64)
    for row, text in enumerate(texts):
        length = len(text) - num_emitted
        ids[row, width - length :], attended[row, width - length :] = text[:length], 1
    rows = Rows(ids, attended.astype(bool))
    emit(rows, [text[len(text) - num_emitted :] for text in texts])
    return rows


def emit(rows: Rows, tokens: Sequence[Sequence[int]]) -> None:
    for row, of_row in enumerate(tokens):
        for token in of_row:
            rows.emit(row, token)


def paths(draft: DraftTree, row: int = 0) -> list[list[int]]:
    """Tokens from the root to every node of a row."""
    found: list[list[int]] = []
    nodes = draft.row(row)
    for token, parent in zip(draft.token_ids[nodes], draft.parents[nodes], strict=True):
        found.append([*(found[parent] if parent != ROOT else []), int(token)])
    return found


def decided(draft: DraftTree, truth: Sequence[int]) -> Verdict:
    """The verdict on a draft of one row whose text goes on like this."""
    path = accepted_path(draft, np.array(truth[:-1]))
    return Verdict.from_rows([truth[: len(path) + 1]], [path])


def assert_ordered(tree: DraftTree, max_nodes: int) -> None:
    """The likeliest nodes come first, none twice, and siblings share their parent's chance."""
    for row in range(tree.num_rows):
        nodes = tree.row(row)
        parents, score = tree.parents[nodes], tree.score[nodes]
        assert len(score) <= max_nodes and (np.diff(score) <= 0).all()
        assert (parents < np.arange(len(parents))).all()
        pairs = zip(parents.tolist(), tree.token_ids[nodes].tolist(), strict=True)
        assert len(set(pairs)) == len(parents)
        for parent in set(parents.tolist()):
            above = 1.0 if parent == ROOT else score[parent]
            assert score[parents == parent].sum() <= above * 1.0001


def draft_two_steps() -> None:
    """Draft for two rows from all sources, as a call does."""
    sources = build(Request(SpeculativeConfig(), prediction=[np.array([1, 2, 3])] * 2))
    text = [*range(6), *range(6), 0]
    rows = rows_of([text[1:], text])
    ensemble = Ensemble(sources, Calibration(sources), 2, vocab_size=50, max_new_tokens=9)
    ensemble.begin(rows)
    for _ in range(2):
        draft = head(ensemble.propose(rows, 8), 4)
        assert draft.num_nodes
        verdict = Verdict.from_rows([[7], [8]], [[], []])
        emit(rows, [[7], [8]])
        logits = torch.zeros(2, 1 + draft.max_nodes + 3, 60)[:, : 1 + draft.max_nodes, :50]
        ensemble.observe(rows, draft, verdict, logits)

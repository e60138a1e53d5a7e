"""The window is an ordinary draft tree, moves with the text and collects what the target writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.rows import Rows
from lookahead_hf.sources.lookahead import LookaheadDrafter
from tests.helpers.drafts import paths, rows_of

VOCAB = 23
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]

pytestmark = pytest.mark.usefixtures("compiles")  # the search for the best tokens


def writes(text: Sequence[int]) -> int:
    """What the target of these tests writes after a text: it depends on the last two tokens."""
    return (5 * text[-1] + 3 * (text[-2] % 3) + 1) % 11


def begun(prompts: Sequence[Sequence[int]], num_ngrams: int = 2) -> tuple[Rows, LookaheadDrafter]:
    """Rows that have emitted one token each, and their drafter."""
    rows = rows_of([[*text, writes(text)] for text in prompts])
    drafter = LookaheadDrafter(window=4, ngram_size=4, num_ngrams=num_ngrams)
    drafter.begin(rows)
    return rows, drafter


def step(rows: Rows, drafter: LookaheadDrafter, most: int = 99) -> list[int]:
    """Propose, verify (a row emits at most so many), observe: how many tokens rows emitted."""
    tree = drafter.propose(rows, 64)
    logits = torch.zeros(rows.num_rows, 1 + tree.max_nodes, VOCAB)
    tokens: list[list[int]] = []
    for row in range(rows.num_rows):
        text, emitted = rows.context(row).tolist(), list[int]()
        for place, path in enumerate([[], *paths(tree, row)]):
            logits[row, place, writes([*text, *path])] = 1.0
        node: int | None = ROOT
        while len(emitted) < most and node is not None:
            emitted.append(int(logits[row, node + 1].argmax()))
            node = tree.child_of(row, node, emitted[-1])
        for token in emitted:
            rows.emit(row, token)
        tokens.append(emitted)
    verdict = Verdict.from_rows(tokens, [[]] * rows.num_rows)
    drafter.observe(Step(rows, tree, verdict, logits))
    return [len(emitted) for emitted in tokens]


def test_a_draft_is_the_ngrams_and_the_window_with_shared_beginnings() -> None:
    rows, drafter = begun(PROMPTS[:1])
    window, last = drafter._windows[0], rows.last_token(0)
    window.levels = np.array([[11, 12, 13, 14], [15, 15, 15, 15], [16, 17, 18, 19]])
    window.add(np.array([[last, 1, 2, 3], [last, 11, 15, 4], [last, 1, 2, 5]]))
    tree = drafter.propose(rows, 64)
    chains = [[1, 2, 5], [11, 15, 4]]  # two are kept, the newest first
    chains += [[11, 15, 16], [11, 12, 15, 17], [11, 12, 13, 15, 18], [11, 12, 13, 14, 15, 19]]
    expected = DraftTree.from_chains([chains])
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert (
        tree.evidence is not None
        and 5 < len(set(tree.evidence.bucket.tolist())) <= drafter.traits.buckets
    )


@pytest.mark.parametrize("most", [1, 3, 99])
def test_the_window_moves_on_by_what_was_emitted(most: int) -> None:
    rows, drafter = begun(PROMPTS)
    for _ in range(12):
        before = [drafter._windows[row].levels.copy() for row in range(2)]
        texts = [rows.context(row).tolist() for row in range(2)]
        emitted = step(rows, drafter, most)
        for row, (old, text) in enumerate(zip(before, texts, strict=True)):
            written = [writes([*text, *old[0, : i + 1], *old[1:, i]]) for i in range(4)]
            moved = np.vstack([old[1:], written])[:, emitted[row] - 1 :]
            now, whole = drafter._windows[row].levels, rows.context(row)
            assert now[:, : moved.shape[1]].tolist() == moved.tolist()
            pieces = np.lib.stride_tricks.sliding_window_view(whole, 3).tolist()
            assert all(new in pieces for new in now[:, moved.shape[1] :].T.tolist())


def test_ngrams_come_from_the_text_and_from_the_window() -> None:
    rows, drafter = begun(PROMPTS[:1], num_ngrams=9)
    window, text = drafter._windows[0], rows.context(0).tolist()
    assert window.after(1) == [(5, 9, 2), (4, 1, 5)]
    old = window.levels
    step(rows, drafter, most=1)
    for column in range(4):
        written = writes([*text, *old[0, : column + 1], *old[1:, column]])
        assert (*old[1:, column].tolist(), written) in window.after(int(old[0, column]))
    assert window.after(2)[0] == (6, *rows.emitted(0).tolist())

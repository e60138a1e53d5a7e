"""The window is an ordinary draft tree, moves with the text and collects what the target writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.sources.lookahead import LookaheadDrafter
from lookahead_hf.rows import Rows
from tests.helpers.drafts import paths, rows_of

VOCAB = 23
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


def writes(text: Sequence[int]) -> int:
    """What the target of these tests writes after a text: it depends on the last two tokens."""
    return (5 * text[-1] + 3 * (text[-2] % 3) + 1) % 11


def begun_rows(prompts: Sequence[Sequence[int]]) -> Rows:
    """Rows that have emitted one token each."""
    return rows_of([[*text, writes(text)] for text in prompts])


def begun(rows: Rows, **options: int) -> LookaheadDrafter:
    drafter = LookaheadDrafter(**{"window": 4, "ngram_size": 4, "num_ngrams": 2, **options})
    drafter.begin(rows)
    return drafter


def windows(drafter: LookaheadDrafter) -> list[np.ndarray]:
    return [window.levels.copy() for window in drafter._rows]


def logits_of(rows: Rows, tree: DraftTree) -> torch.Tensor:
    """The target's certain logits behind the last tokens and every node."""
    logits = torch.zeros(rows.num_rows, 1 + tree.max_nodes, VOCAB)
    for row in range(rows.num_rows):
        text = rows.context(row).tolist()
        for place, path in enumerate([[], *paths(tree, row)]):
            logits[row, place, writes([*text, *path])] = 1.0
    return logits


def step(rows: Rows, drafter: LookaheadDrafter, most: int = 99) -> tuple[DraftTree, list[int]]:
    """Propose, verify (a row emits at most so many), observe: the draft and what rows emitted."""
    tree = drafter.propose(rows, 64)
    logits = logits_of(rows, tree)
    live, tokens = rows.live, []
    for row in range(rows.num_rows):
        emitted: list[int] = []
        node = ROOT
        while live[row] and len(emitted) < most and node is not None:
            emitted.append(int(logits[row, node + 1].argmax()))
            node = tree.child_of(row, node, emitted[-1])
        for token in emitted:
            rows.emit(row, token)
        tokens.append(emitted)
    verdict = Verdict.from_rows(tokens, [[]] * rows.num_rows, live, rows.finished.copy())
    drafter.observe(rows, tree, verdict, logits)
    return tree, [len(emitted) for emitted in tokens]


def is_piece(piece: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(piece)] == piece for i in range(len(text)))


def test_a_draft_is_the_ngrams_and_the_window_with_shared_beginnings() -> None:
    rows = begun_rows(PROMPTS[:1])
    drafter = begun(rows)
    window = drafter._rows[0]
    window.levels = np.array([[11, 12, 13, 14], [15, 15, 15, 15], [16, 17, 18, 19]])
    last = rows.last_token(0)
    for ngram in ([last, 1, 2, 3], [last, 11, 15, 4], [last, 1, 2, 5]):
        window.pool.add(ngram)
    tree = drafter.propose(rows, 64)
    chains = [[1, 2, 5], [11, 15, 4]]  # two are kept, the newest first
    chains += [[11, 15, 16], [11, 12, 15, 17], [11, 12, 13, 15, 18], [11, 12, 13, 14, 15, 19]]
    expected = DraftTree.from_chains([chains])
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.depth.tolist() == expected.depth.tolist()
    assert tree.evidence is not None
    assert len(set(tree.evidence.bucket.tolist())) > 5
    assert tree.evidence.bucket.max() < drafter.num_buckets == len(drafter.prior())


@pytest.mark.parametrize("most", [1, 2, 3, 99])
def test_the_window_moves_on_by_what_was_emitted(most: int) -> None:
    rows = begun_rows(PROMPTS)
    drafter = begun(rows)
    counts = set()
    for _ in range(12):
        before, texts = windows(drafter), [rows.context(row).tolist() for row in range(2)]
        _, emitted = step(rows, drafter, most)
        for row, (old, text) in enumerate(zip(before, texts, strict=True)):
            counts.add(emitted[row])
            stems = [[*old[0, : i + 1], *old[1:, i]] for i in range(4)]
            written = [writes([*text, *stem]) for stem in stems]
            moved = np.vstack([old[1:], written])[:, emitted[row] - 1 :]
            now = drafter._rows[row].levels
            assert now[:, : moved.shape[1]].tolist() == moved.tolist()
            for column in range(moved.shape[1], 4):
                assert is_piece(now[:, column].tolist(), rows.context(row).tolist())
    assert min(counts) == 1 and max(counts) >= min(most, 5)


def test_a_step_without_a_draft_moves_the_window_alone() -> None:
    rows = begun_rows(PROMPTS[:1])
    drafter = begun(rows)
    old = windows(drafter)[0]
    rows.emit(0, 7)
    verdict = Verdict.from_rows([[7]], [[]])
    drafter.observe(rows, DraftTree.empty(1), verdict, torch.zeros(1, 1, VOCAB))
    assert windows(drafter)[0][:, :3].tolist() == old[:, 1:].tolist()


def test_ngrams_come_from_the_text_and_from_the_window() -> None:
    rows = begun_rows(PROMPTS[:1])
    drafter = begun(rows, num_ngrams=9)
    pool = drafter._rows[0].pool
    assert pool.after(1) == [(5, 9, 2), (4, 1, 5)]
    assert pool.after(9) == [(2, 6, rows.last_token(0))]
    old, text = windows(drafter)[0], rows.context(0).tolist()
    step(rows, drafter, most=1)
    for column in range(4):
        written = writes([*text, *old[0, : column + 1], *old[1:, column]])
        assert (*old[1:, column].tolist(), written) in pool.after(int(old[0, column]))
    assert pool.after(2)[0] == (6, *rows.emitted(0).tolist())

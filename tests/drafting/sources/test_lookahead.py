"""The window is an ordinary draft tree, moves with the text and collects what the target writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.sources.lookahead import LookaheadDrafter, WindowNgrams
from lookahead_hf.rows import Rows
from lookahead_hf.runner.cuda.transfer import HostCopy
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


def step(
    rows: Rows, drafter: LookaheadDrafter, most: int = 99, copy: HostCopy | None = None
) -> tuple[DraftTree, list[int]]:
    """Propose, verify (a row emits at most so many), observe: the draft and what rows emitted.

    With a `copy` what the drafter learns has come with it, and the logits are gone.
    """
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
    drafter.prepare(logits)
    if copy is not None:
        drafter.bring(copy)
        copy.send()
        logits.fill_(torch.nan)
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


def test_a_small_draft_leaves_room_for_the_window() -> None:
    rows = begun_rows(PROMPTS[:1])
    drafter = begun(rows, num_ngrams=9)
    for token in range(12, 20):
        drafter._rows[0].pool.add([rows.last_token(0), token, token, token])
    for max_nodes, num_ngrams in ((64, 9), (20, 3), (5, 0)):
        tree = drafter.propose(rows, max_nodes)
        assert tree.evidence is not None
        of_ngrams = tree.evidence.bucket < 2 * 4  # two kinds at four depths
        assert 3 * num_ngrams - 2 <= of_ngrams.sum() <= max(0, max_nodes // 2)


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


def test_what_it_learns_comes_with_the_verdict() -> None:
    learned = []
    for copied in (False, True):
        rows = begun_rows(PROMPTS)
        drafter = begun(rows)
        for _ in range(12):
            step(rows, drafter, copy=HostCopy() if copied else None)
        learned.append([window.tolist() for window in windows(drafter)])
    assert learned[0] == learned[1]


def test_columns_that_were_not_verified_begin_anew() -> None:
    rows = begun_rows(PROMPTS[:1])
    drafter = begun(rows)
    tree = drafter.propose(rows, 64)
    old = windows(drafter)[0]
    last_of_second = [*old[0, :2], *old[1:, 1]]
    node = ROOT
    for token in last_of_second:
        node = tree.child_of(0, node, int(token)) or 0
    keep = [n for n in range(tree.num_nodes) if n != node]
    place = {ROOT: ROOT, **{n: i for i, n in enumerate(keep)}}
    kept = [(int(tree.token_ids[n]), place[int(tree.parents[n])]) for n in keep]
    cut = DraftTree.from_rows([([t for t, _ in kept], [p for _, p in kept])])
    text = rows.context(0).tolist()
    logits = logits_of(rows, cut)
    rows.emit(0, writes(text))
    verdict = Verdict.from_rows([rows.emitted(0)[-1:].tolist()], [[]])
    drafter.observe(rows, cut, verdict, logits)
    now = windows(drafter)[0]
    assert now[:-1, [0, 2, 3]].tolist() == old[1:, [0, 2, 3]].tolist()
    assert now[-1, 0] == writes([*text, *old[:, 0]])
    assert is_piece(now[:, 1].tolist(), rows.context(0).tolist())


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


def test_a_pool_keeps_what_was_seen_last() -> None:
    pool = WindowNgrams(2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [8, 2, 3]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(8) == [(2, 3)]
    assert pool.after(9) == []


def test_a_repeating_text_is_foreseen() -> None:
    rows = begun_rows(PROMPTS)
    drafter = begun(rows)
    emitted = [step(rows, drafter)[1] for _ in range(60)]
    assert np.mean(emitted[30:]) > 3


def test_short_prompts_are_drafted_from() -> None:
    rows = rows_of([[5, 7]])
    assert step(rows, begun(rows))[0].num_nodes > 0


def test_no_random_number_of_torch_is_drawn_and_calls_are_alike() -> None:
    before = torch.get_rng_state()
    trees = []
    for _ in range(2):
        rows = begun_rows(PROMPTS)
        drafter = begun(rows)
        trees.append([step(rows, drafter)[0].token_ids.tolist() for _ in range(5)])
    assert trees[0] == trees[1]
    assert torch.equal(torch.get_rng_state(), before)

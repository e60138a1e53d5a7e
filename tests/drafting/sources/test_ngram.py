"""The drafter that looks the text up in itself."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.drafting.sources.ngram import NgramDrafter
from lookahead_hf.rows import Rows
from tests.helpers.drafts import emit, paths, rows_of

NO_LOGITS = torch.empty(0)


def begun(prompt: list[list[int]], first: list[int]) -> tuple[NgramDrafter, Rows]:
    """A drafter that has seen the prompts (0 is padding) and one emitted token per row."""
    ids = np.array(prompt)
    rows = Rows(ids, ids != 0)
    emit(rows, [[token] for token in first])
    drafter = NgramDrafter()
    drafter.begin(rows)
    return drafter, rows


def observe(drafter: NgramDrafter, rows: Rows, draft: DraftTree, tokens: list[list[int]]) -> None:
    """Let each row emit tokens, none of them accepted from the draft."""
    emit(rows, tokens)
    verdict = Verdict.from_rows(tokens, [[]] * len(tokens), finished=rows.finished.copy())
    drafter.observe(Step(rows, draft, verdict, NO_LOGITS))


def test_what_was_emitted_is_drafted_later() -> None:
    drafter, rows = begun([[1, 2, 3], [4, 5, 6]], [9, 9])
    draft = drafter.propose(rows, 8)
    assert draft.num_nodes == 0
    observe(drafter, rows, draft, [[7, 8, 9], [2]])
    draft = drafter.propose(rows, 8)
    assert paths(draft, 0) == [[7], [7, 8], [7, 8, 9], *paths(draft, 0)[3:]]
    assert paths(draft, 1) == []


def test_the_encoder_text_is_searched_too() -> None:
    rows = Rows(np.array([[1], [1]]), encoder_ids=[np.array([5, 6, 7]), np.array([5, 8])])
    for row in range(2):
        rows.emit(row, 5)
    drafter = NgramDrafter()
    drafter.begin(rows)
    draft = drafter.propose(rows, 8)
    assert paths(draft, 0) == [[6], [6, 7]]
    assert paths(draft, 1) == [[8]]


def test_a_row_that_another_text_takes_forgets_the_text_before() -> None:
    drafter, rows = begun([[0, 0, 5, 6, 7], [8, 9, 4, 3, 8]], [5, 9])
    taken = rows_of([[11, 12, 13, 11], [8, 9, 4, 3, 8, 9]])
    drafter.begin_row(taken, 0)
    draft = drafter.propose(taken, 2)
    assert paths(draft, 0) == [[12], [12, 13]]
    assert paths(draft, 1)[0] == [4]


def test_rows_draft_the_same_together_and_alone() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 6, 30 + 7 * row).tolist() for row in range(12)]
    together, rows = NgramDrafter(), rows_of(texts)
    together.begin(rows)
    rows.end(5)
    tree = together.propose(rows, 16)
    for row, text in enumerate(texts):
        alone = NgramDrafter()
        alone.begin(rows_of([text]))
        expected = paths(alone.propose(rows_of([text]), 16))
        assert expected and paths(tree, row) == (expected if row != 5 else [])

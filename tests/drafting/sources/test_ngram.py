"""The drafter that looks the text up in itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.drafter import Step
from lookahead_hf.drafting.sources.ngram import NgramDrafter
from lookahead_hf.ngram_pool import SuffixIndexes
from lookahead_hf.rows import Rows
from tests.helpers.drafts import emit, paths, rows_of

NO_LOGITS = torch.empty(0)


def begun(prompt: list[list[int]], first: list[int], **options: int) -> tuple[NgramDrafter, Rows]:
    """A drafter that has seen the prompts (0 is padding) and one emitted token per row."""
    ids = np.array(prompt)
    rows = Rows(ids, ids != 0)
    emit(rows, [[token] for token in first])
    drafter = NgramDrafter(**options)
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


def turn(drafter: NgramDrafter, prompt: list[int], text: list[int]) -> list[list[int]]:
    """A call that emits a text; returns what is drafted after it."""
    rows = rows_of([[*prompt, text[0]]])
    drafter.begin(rows)
    for token in text[1:]:
        observe(drafter, rows, drafter.propose(rows, 4), [[token]])
    draft = drafter.propose(rows, 4)
    drafter.end(rows)
    return paths(draft, 0)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that are added to indexes."""
    tokens: list[int] = []
    extend = SuffixIndexes.extend

    def noting(self: SuffixIndexes, offsets: Any, token_ids: Any) -> None:
        tokens.extend(np.asarray(token_ids).tolist())
        extend(self, offsets, token_ids)

    monkeypatch.setattr(SuffixIndexes, "extend", noting)
    return tokens


def test_a_kept_index_takes_what_is_new_and_drafts_as_a_fresh_index_does(added: list[int]) -> None:
    keeping = NgramDrafter(keep=True)
    turn(keeping, [5, 6, 7, 8], [9, 5])
    added.clear()
    prompt = [5, 6, 7, 8, 9, 5, 11, 12]
    drafted = turn(keeping, prompt, [6, 7])
    assert added == [11, 12, 6, 7]
    assert drafted == turn(NgramDrafter(), prompt, [6, 7])
    assert drafted[0] == [8]


def test_a_text_that_goes_another_way_stays_known(added: list[int]) -> None:
    keeping = NgramDrafter(keep=True)
    turn(keeping, [5, 6, 7, 8], [9, 10])
    added.clear()
    assert turn(keeping, [5, 6, 7, 20], [7, 8])[0] == [9]
    assert added == [-1, 20, 7, 8]


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

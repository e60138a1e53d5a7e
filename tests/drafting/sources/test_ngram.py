"""The drafter that looks the text up in itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.calibration import Calibration
from lookahead_hf.drafting.sources.ngram import NgramDrafter
from lookahead_hf.ngram_pool import NumbaMissingError, compilation
from lookahead_hf.rows import Rows

NO_LOGITS = torch.empty(0)


def begun(prompt: list[list[int]], first: list[int], **options: int) -> tuple[NgramDrafter, Rows]:
    """A drafter that has seen the prompts (0 is padding) and one emitted token per row."""
    ids = np.array(prompt)
    rows = Rows(ids, ids != 0)
    for row, token in enumerate(first):
        rows.emit(row, token)
    drafter = NgramDrafter(**options)
    drafter.begin(rows)
    return drafter, rows


def emit(drafter: NgramDrafter, rows: Rows, draft: DraftTree, tokens: list[list[int]]) -> None:
    """Let each row emit tokens, none of them accepted from the draft."""
    for row, row_tokens in enumerate(tokens):
        for token in row_tokens:
            rows.emit(row, token)
    verdict = Verdict.from_rows(tokens, [[]] * len(tokens), finished=rows.finished.copy())
    drafter.observe(rows, draft, verdict, NO_LOGITS)


def chains(draft: DraftTree, row: int) -> list[list[int]]:
    """Path of every node of a row."""
    found: list[list[int]] = []
    nodes = draft.row(row)
    for token, parent in zip(draft.token_ids[nodes], draft.parents[nodes], strict=True):
        found.append([*(found[parent] if parent >= 0 else []), int(token)])
    return found


def test_each_row_drafts_from_its_own_text() -> None:
    drafter, rows = begun([[0, 0, 5, 6, 7], [8, 9, 4, 3, 8]], [5, 9])
    draft = drafter.propose(rows, 2)
    assert chains(draft, 0)[0] == [6]
    assert chains(draft, 1)[0] == [4]
    assert draft.depth.tolist() == [len(path) for row in (0, 1) for path in chains(draft, row)]


def test_what_was_emitted_is_drafted_later() -> None:
    drafter, rows = begun([[1, 2, 3], [4, 5, 6]], [9, 9])
    draft = drafter.propose(rows, 8)
    assert draft.num_nodes == 0
    emit(drafter, rows, draft, [[7, 8, 9], [2]])
    draft = drafter.propose(rows, 8)
    assert chains(draft, 0) == [[7], [7, 8], [7, 8, 9], *chains(draft, 0)[3:]]
    assert chains(draft, 1) == []


def test_a_finished_row_gets_no_draft() -> None:
    drafter, rows = begun([[1, 2], [1, 2]], [1, 1])
    rows.finished[0] = True
    draft = drafter.propose(rows, 8)
    assert draft.row_offsets.tolist() == [0, 0, draft.num_nodes]
    assert chains(draft, 1)[0] == [2]
    rows.finished[1] = True
    assert drafter.propose(rows, 8).row_offsets.tolist() == [0, 0, 0]


def test_the_encoder_text_is_searched_too() -> None:
    rows = Rows(np.array([[1], [1]]), encoder_ids=[np.array([5, 6, 7]), np.array([5, 8])])
    for row in range(2):
        rows.emit(row, 5)
    drafter = NgramDrafter()
    drafter.begin(rows)
    draft = drafter.propose(rows, 8)
    assert chains(draft, 0) == [[6], [6, 7]]
    assert chains(draft, 1) == [[8]]


def test_every_node_has_one_piece_of_evidence_and_the_score_of_its_path() -> None:
    text = np.random.default_rng(1).integers(1, 6, 60).tolist()
    drafter, rows = begun([text], [3])
    drafter.rates = np.random.default_rng(2).random(drafter.num_buckets).astype(np.float32)
    draft = drafter.propose(rows, 40)
    assert draft.num_nodes == 40
    evidence = draft.evidence
    assert evidence is not None
    assert evidence.offsets.tolist() == list(range(41))
    assert set(evidence.source.tolist()) == {0}
    for node, parent in enumerate(draft.parents.tolist()):
        above = draft.score[parent] if parent >= 0 else 1.0
        expected = above * drafter.rates[evidence.bucket[node]]
        np.testing.assert_allclose(draft.score[node], expected, rtol=1e-6)
    assert (np.diff(draft.score) <= 0).all()


def test_a_long_copy_is_drafted_as_one_long_chain() -> None:
    page = list(range(10, 110))
    drafter, rows = begun([[*page, *page[:20]]], [page[20]])
    draft = drafter.propose(rows, 48)
    assert chains(draft, 0)[-1] == page[21:69]


def test_learned_rates_decide_what_is_drafted() -> None:
    drafter, rows = begun([[1, 2, 3, 1, 2]], [3])
    calibration = Calibration([drafter])
    draft = drafter.propose(rows, 3)
    assert chains(draft, 0) == [[1], [1, 2], [1, 2, 3]]
    calibration.rates[:] = 0.0
    assert drafter.propose(rows, 3).num_nodes == 0


def test_a_draft_outlives_the_next_one() -> None:
    drafter, rows = begun([[1, 2, 3, 1, 2]], [3])
    draft = drafter.propose(rows, 3)
    before = [draft.token_ids.copy(), draft.parents.copy(), draft.score.copy()]
    emit(drafter, rows, draft, [[2]])
    drafter.propose(rows, 3)
    for array, copy in zip((draft.token_ids, draft.parents, draft.score), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_the_prior_rises_with_length_share_and_count() -> None:
    prior = NgramDrafter().prior()
    assert prior.shape == (NgramDrafter().num_buckets,)
    assert prior.dtype == np.float32
    table = prior.reshape(11, 4, 3)
    for axis in range(3):
        assert (np.diff(table, axis=axis) > 0).all()


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"max_ngram": 33}, {"max_ngram": "8"}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"were given: choose integers with 1 <= min_ngram"):
        NgramDrafter(**options)


def test_options_reach_the_index() -> None:
    prompt = [[1, 2, 3, 9, 2]]
    drafter, rows = begun(prompt, [3], min_ngram=2)
    assert chains(drafter.propose(rows, 1), 0) == [[9]]
    drafter, rows = begun(prompt, [3], min_ngram=3)
    assert drafter.propose(rows, 8).num_nodes == 0


def test_without_numba_there_is_no_such_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rows = begun([[1, 2]], [3])
    monkeypatch.setattr(compilation, "_is_installed", lambda: False)
    with pytest.raises(NumbaMissingError, match="pip install numba"):
        NgramDrafter()
    with pytest.raises(NumbaMissingError, match="pip install numba"):
        drafter.begin(rows)

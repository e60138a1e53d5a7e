"""An index that is kept from call to call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lookahead_hf.drafting.sources.lasting import LastingNgramDrafter
from lookahead_hf.ngram_pool import SuffixIndex
from lookahead_hf.rows import Rows
from tests.drafting.sources.test_ngram import chains, emit


def turn(drafter: LastingNgramDrafter, prompt: list[int], text: list[int]) -> list[list[int]]:
    """A call that emits a text; returns what is drafted after it."""
    rows = Rows(np.array([prompt]))
    rows.emit(0, text[0])
    drafter.begin(rows)
    for token in text[1:]:
        emit(drafter, rows, drafter.propose(rows, 4), [[token]])
    draft = drafter.propose(rows, 4)
    drafter.end(rows)
    return chains(draft, 0)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects what is added to indexes."""
    tokens: list[int] = []
    extend = SuffixIndex.extend

    def noting(self: SuffixIndex, token_ids: Any) -> None:
        tokens.extend(np.asarray(token_ids).tolist())
        extend(self, token_ids)

    monkeypatch.setattr(SuffixIndex, "extend", noting)
    return tokens


def test_a_turn_adds_what_is_new_and_drafts_as_a_fresh_index_does(added: list[int]) -> None:
    lasting = LastingNgramDrafter()
    turn(lasting, [5, 6, 7, 8], [9, 5])
    added.clear()
    prompt = [5, 6, 7, 8, 9, 5, 11, 12]
    drafted = turn(lasting, prompt, [6, 7])
    assert added == [11, 12, 6, 7]
    assert drafted == turn(LastingNgramDrafter(), prompt, [6, 7])
    assert drafted[0] == [8]


def test_a_text_that_goes_another_way_stays_known(added: list[int]) -> None:
    lasting = LastingNgramDrafter()
    turn(lasting, [5, 6, 7, 8], [9, 10])
    added.clear()
    assert turn(lasting, [5, 6, 7, 20], [7, 8])[0] == [9]
    assert added == [-1, 20, 7, 8]


def test_a_batch_begins_anew() -> None:
    lasting = LastingNgramDrafter()
    turn(lasting, [5, 6, 7, 8], [9, 10])
    rows = Rows(np.array([[1, 2], [3, 4]]))
    for row in range(2):
        rows.emit(row, 5)
    lasting.begin(rows)
    assert len(lasting.propose(rows, 4).token_ids) == 0
    lasting.end(rows)
    assert turn(lasting, [7, 8], [7])[0] == [8]


def test_rates_are_those_of_the_drafter_by_name() -> None:
    assert LastingNgramDrafter().kept_as == "lookahead_hf.drafting.sources.ngram.NgramDrafter"
    with pytest.raises(ValueError, match="min_ngram"):
        LastingNgramDrafter(min_ngram=0)

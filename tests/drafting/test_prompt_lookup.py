"""Until numba's functions are loaded, drafts come from the latest longest match in the text."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import lookahead_hf
from lookahead_hf import SpeculativeConfig, ngram_pool
from lookahead_hf.drafting.prompt_lookup import PromptLookup, longest_match
from lookahead_hf.drafting.sources.ngram import ONLY_CONTINUATION, NgramDrafter
from lookahead_hf.rows import Rows
from tests.helpers.compared import speculated
from tests.helpers.models import tiny


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ([1, 2, 3], (0, 0)),
        ([7], (0, 0)),
        ([1, 2, 3, 9, 1, 2], (2, 2)),
        ([1, 2, 3, 4, 8, 2, 5, 6, 1, 2], (2, 2)),  # longer before later
        ([2, 4, 4, 8, 2, 5, 5, 9, 2], (5, 1)),  # later of the same length
        ([1, 1, 1, 1], (3, 3)),
    ],
)
def test_the_match(context: list[int], found: tuple[int, int]) -> None:
    assert longest_match(np.array(context), 32) == found


def test_chains_respect_the_limits_of_the_call() -> None:
    rows = Rows(np.array([[1, 2, 3, 40, 5, 1, 2], [1, 2, 3, 4, 5, 1, 2], [1, 2, 3, 4, 5, 6, 7]]))
    for row in range(3):
        rows.emit(row, 3)
    lookup = PromptLookup([NgramDrafter(min_ngram=2)], vocab_size=30, max_new_tokens=4)
    tree = lookup.propose(rows, 8)
    # Row 0 meets a token beyond the vocabulary, row 1 the end of the call, row 2 has no match.
    assert np.diff(tree.row_offsets).tolist() == [0, 2, 0]
    assert tree.token_ids.tolist() == [4, 5]
    # Three tokens match before the first node, four before the second.
    assert_allclose(tree.score, np.cumprod(ONLY_CONTINUATION[2:4]), rtol=1e-6)
    assert lookup.propose(rows, 1).num_nodes == 1


def test_ids_that_are_no_tokens_end_a_chain() -> None:
    rows = Rows(np.array([[1, 2, 3, -200, 5, 1, 2]]))
    rows.emit(0, 3)
    tree = PromptLookup([NgramDrafter()], vocab_size=30, max_new_tokens=90).propose(rows, 5)
    assert tree.num_nodes == 0


def test_a_text_that_repeats_itself_goes_on() -> None:
    rows = Rows(np.array([[7, 1, 2, 1]]))
    rows.emit(0, 2)
    tree = PromptLookup([NgramDrafter()], vocab_size=30, max_new_tokens=90).propose(rows, 5)
    assert tree.token_ids.tolist() == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_first_call_drafts(rows: int, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(ngram_pool, "ready", lambda: False)
    model = lookahead_hf.enable(tiny("llama"))
    ids = torch.arange(10, 30).repeat(rows, 3) + torch.arange(rows)[:, None]
    call = {"max_new_tokens": 40, "do_sample": do_sample, "pad_token_id": 0}
    call |= {"temperature": 0.05} if do_sample else {}
    torch.manual_seed(3)
    plain = model.generate(ids, **call, repetition_penalty=0.4)
    torch.manual_seed(3)
    config = SpeculativeConfig(budget=6)
    ours = model.generate(ids, **call, repetition_penalty=0.4, speculative=config)
    assert ours.tolist() == plain.tolist()
    stats = speculated(model)
    assert stats.num_accepted > 0
    assert stats.per_source["ngram"].accepted == stats.num_accepted
    assert stats.per_source["ngram"].drafted == stats.num_drafted


def test_without_the_ngram_source_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(ngram_pool, "ready", lambda: False)
    model = lookahead_hf.enable(tiny("llama"))
    ids = torch.arange(10, 30).repeat(1, 3)
    config = SpeculativeConfig(drafters=("recycling",), budget=6)
    model.generate(ids, max_new_tokens=10, do_sample=False, speculative=config)
    assert lookahead_hf.last_stats(model).num_drafted == 0

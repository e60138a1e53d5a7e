"""Until numba's functions are loaded, drafts come from the prediction and from the text itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import lookahead_hf
from lookahead_hf import SpeculativeConfig, ngram_pool
from lookahead_hf.draft import Verdict
from lookahead_hf.drafting.control.calibration import Calibration
from lookahead_hf.drafting.ensemble import Ensemble
from lookahead_hf.drafting.sources.ngram import ONLY_CONTINUATION, NgramDrafter
from lookahead_hf.drafting.sources.prediction import PredictionDrafter
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.drafting.uncompiled import UncompiledDrafts, longest_match
from lookahead_hf.rows import Rows
from tests.helpers.calls import GREEDY
from tests.helpers.compared import compared, speculated
from tests.helpers.drafts import rows_of
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
    lookup = UncompiledDrafts([NgramDrafter(min_ngram=2)], vocab_size=30, max_new_tokens=4)
    tree = lookup.propose(rows, 8)
    # Row 0 meets a token beyond the vocabulary, row 1 the end of the call, row 2 has no match.
    assert np.diff(tree.row_offsets).tolist() == [0, 2, 0]
    assert tree.token_ids.tolist() == [4, 5]
    # Three tokens match before the first node, four before the second.
    assert_allclose(tree.score, np.cumprod(ONLY_CONTINUATION[2:4]), rtol=1e-6)
    assert lookup.propose(rows, 1).num_nodes == 1


@pytest.mark.parametrize(
    ("text", "source", "drafted"),
    [
        ([1, 2, 3, -200, 5, 1, 2, 3], NgramDrafter, []),  # an id that is no token ends a chain
        ([7, 1, 2, 1, 2], NgramDrafter, [1, 2, 1, 2, 1]),  # a text that repeats itself goes on
        ([7, 1, 2, 1, 2], RecyclingDrafter, []),
    ],
)
def test_what_a_text_drafts(text: list[int], source: Any, drafted: list[int]) -> None:
    drafts = UncompiledDrafts([source()], vocab_size=30, max_new_tokens=90)
    assert drafts.propose(rows_of([text]), 5).token_ids.tolist() == drafted


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_first_call_drafts(rows: int, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_pool.of_process, "ready", lambda: False)
    ids = torch.arange(10, 30).repeat(rows, 3) + torch.arange(rows)[:, None]
    call = {"input_ids": ids, **GREEDY, "do_sample": do_sample, "repetition_penalty": 0.4}
    call |= {"temperature": 0.05} if do_sample else {}
    config = SpeculativeConfig(budget=6)
    stats = compared(tiny("llama"), lambda: dict(call), 60, config=config).stats
    assert stats.per_source["ngram"].accepted == stats.num_accepted
    assert stats.per_source["ngram"].drafted == stats.num_drafted


def test_each_row_has_the_likelier_chain_and_its_source_counts() -> None:
    # Row 0 follows its prediction up to an id beyond the vocabulary, row 1 has left it.
    rows = Rows(np.array([[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 1, 2]]))
    rows.emit(0, 3)
    rows.emit(1, 3)
    predictions = [np.array([3, 7, 8, 40, 9]), np.array([20, 21, 22, 23])]
    sources = [NgramDrafter(), PredictionDrafter(predictions)]
    tree = UncompiledDrafts(sources, vocab_size=30, max_new_tokens=90).propose(rows, 3)
    assert tree.token_ids.tolist() == [7, 8, 4, 1, 2]
    assert tree.evidence is not None
    assert tree.evidence.source.tolist() == [1, 1, 0, 0, 0]
    ensemble = Ensemble(sources, Calibration(sources), 2)
    ensemble.count_chains(tree, Verdict.from_rows([[7, 5], [4, 1, 9]], [[0], [0, 1]]))
    assert ensemble.counts.tolist() == [[[0, 2], [0, 1], [0, 1]], [[3, 0], [2, 0], [2, 0]]]


@pytest.mark.parametrize("drafters", [None, ("recycling",)])
@pytest.mark.parametrize(("do_sample", "returned"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("num_steps", [4, 1000])
def test_a_prediction_drafts_from_the_first_step_on(
    drafters: tuple[str, ...] | None,
    do_sample: bool,
    returned: int,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    ids = torch.arange(10, 30).repeat(2, 1) + torch.arange(2)[:, None]
    call = {"max_new_tokens": 40, "pad_token_id": 0, "do_sample": do_sample}
    call["num_return_sequences"] = returned
    torch.manual_seed(3)
    plain = model.generate(ids, **call)
    edited = plain[:: len(plain) // 2, ids.shape[1] :].clone()
    edited[:, 10] += 1  # the text leaves its prediction there
    asked = iter([False] * num_steps)
    monkeypatch.setattr(ngram_pool.of_process, "ready", lambda: next(asked, True))
    config = SpeculativeConfig(budget=6, drafters=drafters)
    torch.manual_seed(3)
    ours = model.generate(ids, **call, speculative=config, prediction=edited.tolist())
    assert ours.tolist() == plain.tolist()
    stats = speculated(model)
    assert stats.per_source["prediction"].accepted > 20
    if num_steps > 40:
        assert sum(each.drafted for each in stats.per_source.values()) == stats.num_drafted
        assert sum(each.accepted for each in stats.per_source.values()) == stats.num_accepted

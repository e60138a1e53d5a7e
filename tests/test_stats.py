"""The statistics of a call, which call `last_stats` returns, totals, and who hears of calls."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn
from transformers import GenerationMixin

import lookahead_hf
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.fallback import FallbackReason, Unserved, report
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.model.state import state_of
from lookahead_hf.stats import (
    RowStats,
    SourceStats,
    SpeculativeStats,
    Totals,
    last_stats,
    of_this_thread,
    publish,
)
from tests.helpers.calls import run
from tests.helpers.compiled import in_threads
from tests.helpers.models import tiny

DRAFTS = {"budget": 8, "drafters": ["ngram", "recycling"]}


class Model(GenerationMixin):
    """What statistics are kept of."""


def verdict(paths: list[list[int] | None]) -> Verdict:
    """Rows that accept these nodes and emit a bonus token; None is a row that is not live."""
    emitted = [[] if path is None else [7] * (len(path) + 1) for path in paths]
    return Verdict.from_rows(
        emitted, [path or [] for path in paths], finished=np.array([path is None for path in paths])
    )


def finished(recorder: StatsRecorder, num_text: list[int], **counts: Any) -> SpeculativeStats:
    """The record of a call whose rows have emitted this many tokens."""
    rows = SimpleNamespace(num_text=np.asarray(num_text))
    return recorder.finish(rows, engine="walk", per_source=counts)


def recorded() -> SpeculativeStats:
    """Two rows: a tree and a chain in the first step, one row left for the other two steps."""
    recorder = StatsRecorder(2)
    tree = DraftTree.from_rows([([4, 5, 6], [-1, -1, 0]), ([8, 9], [-1, 0])])
    recorder.observe(tree, verdict([[0, 2], []]))
    recorder.observe(DraftTree.from_rows([([], []), ([3], [-1])]), verdict([None, [0]]))
    recorder.observe(DraftTree.empty(2), verdict([None, []]))
    ngram = SourceStats(5, 3, 2)
    return finished(recorder, [1 + 3, 1 + 1 + 2 + 1], ngram=ngram)


def test_counts() -> None:
    stats = recorded()
    assert (stats.rows, stats.num_steps, stats.row_steps) == (2, 3, 4)
    assert (stats.num_emitted, stats.num_drafted, stats.num_accepted) == (9, 6, 3)
    assert stats.row_stats == (RowStats(1, 4, 3, 2), RowStats(3, 5, 3, 1))
    assert stats.accepted_histogram == (2, 1, 1)
    assert stats.budget_histogram == {0: 1, 1: 1, 3: 1}
    assert stats.per_source == {"ngram": SourceStats(5, 3, 2)}
    assert (stats.num_moved, stats.engine) == (1, "walk")
    assert stats.fallback_reason is None
    assert stats.tokens_per_step == (9 - 2) / 4
    assert stats.acceptance_rate == 3 / 6


def test_plain_decoding_is_one_token_per_step_in_any_batch() -> None:
    recorder = StatsRecorder(3)
    for live in ([[], [], []], [[], None, []], [[], None, None]):
        recorder.observe(DraftTree.empty(3), verdict(live))  # type: ignore[arg-type]
    stats = finished(recorder, [4, 2, 3])
    assert stats.tokens_per_step == 1.0


def test_to_dict_is_json() -> None:
    values = recorded().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["tokens_per_step"] == 1.75
    assert values["row_stats"][0] == {
        "row_steps": 1, "num_emitted": 4, "num_drafted": 3, "num_accepted": 2,
    }  # fmt: skip
    fallen = SpeculativeStats(fallback_reason=FallbackReason.BEAMS).to_dict()
    assert json.loads(json.dumps(fallen))["fallback_reason"] == "beams"
    assert type(fallen["fallback_reason"]) is str


def test_the_fields_of_vllm() -> None:
    values = recorded().to_dict("vllm")
    assert json.loads(json.dumps(values)) == values == {
        "mean_acceptance_length": 1.75,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [2, 1, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 6,
    }  # fmt: skip
    idle = SpeculativeStats(rows=1, num_emitted=1).to_dict("vllm")
    assert (idle["mean_acceptance_length"], idle["draft_acceptance_rate"]) == (1.0, 0.0)
    with pytest.raises(ValueError, match="known: full, vllm"):
        recorded().to_dict("sglang")


def test_text() -> None:
    text = str(recorded())
    assert "1.75 tokens per step: 9 tokens in 3 steps, 2 rows, engine walk" in text
    assert "3 of 6 draft tokens accepted (50%)" in text
    assert "ngram: 3 of 5 accepted, 2 alone" in text
    assert "beams" in str(SpeculativeStats(fallback_reason=FallbackReason.BEAMS))
    assert "nan" not in str(SpeculativeStats(rows=1, num_emitted=1, engine="walk"))


def test_the_latest_call_of_any_thread() -> None:
    model, ours, theirs = Model(), SpeculativeStats(rows=1), SpeculativeStats(rows=2)
    assert last_stats(model) is None
    publish(model, ours)
    in_threads(lambda: publish(model, theirs))
    assert last_stats(model) is theirs and of_this_thread(model) is ours
    publish(model, ours)
    assert last_stats(model) is ours
    in_threads(lambda: publish(model, None))
    assert last_stats(model) is None and of_this_thread(model) is ours


@pytest.fixture
def model() -> Any:
    return lookahead_hf.enable(tiny("llama"))


class Wrapper(nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


@pytest.mark.filterwarnings("ignore::lookahead_hf.SpeculationFallbackWarning")
def test_totals_add_calls_up_until_they_are_reset(model: Any) -> None:
    assert lookahead_hf.totals(model) == Totals()
    seen = []
    for rows in (1, 2):
        run(model, rows, speculative=DRAFTS, max_new_tokens=24)
        seen.append(last_stats(model))
        run(model)  # does not ask for speculation
    run(model, speculative=True, num_beams=2)
    found = lookahead_hf.totals(Wrapper(model))
    assert (found.num_calls, found.fallbacks) == (3, {"beams": 1})
    assert found.stats.fallback_reason is None and found.stats.rows == 3
    assert found.stats.num_accepted == sum(stats.num_accepted for stats in seen) > 0
    histogram = found.stats.to_dict("vllm")["acceptance_histogram"]
    assert sum(histogram) == found.stats.row_steps == sum(stats.row_steps for stats in seen)
    assert str(found).startswith("3 calls, 1 plain (beams)\n")
    lookahead_hf.reset_totals(model)
    assert lookahead_hf.totals(model) == Totals()
    assert str(Totals(num_calls=2, fallbacks={"beams": 2})) == "2 calls, 2 plain (beams)"


def test_listeners_hear_each_call_and_cannot_cost_the_text(model: Any) -> None:
    heard: list[SpeculativeStats] = []
    stop = lookahead_hf.on_stats(Wrapper(model), heard.append)
    expected = run(model).tolist()

    def fails(stats: SpeculativeStats) -> None:
        raise OSError("no space left")

    stop_failing = lookahead_hf.on_stats(model, fails)
    with pytest.warns(RuntimeWarning, match="callback of on_stats raised OSError: no space left"):
        assert run(model, speculative=DRAFTS).tolist() == expected
    assert heard == [last_stats(model)] and heard[0].fallback_reason is None
    stop_failing()
    output = run(model, speculative=DRAFTS, return_dict_in_generate=True)
    assert heard[1] is output.speculative_stats is last_stats(model)
    stop()
    stop()
    run(model, speculative=DRAFTS)
    assert len(heard) == 2


@pytest.mark.filterwarnings("ignore::lookahead_hf.SpeculationFallbackWarning")
@pytest.mark.parametrize(
    "keep",
    [
        lambda model: publish(model, SpeculativeStats()),
        lambda model: report(model, Unserved(FallbackReason.MODEL), "warn"),
        state_of,
    ],
    ids=["statistics", "a fallback", "state"],
)
def test_what_is_kept_does_not_keep_a_model_alive(keep: Callable[[Any], Any]) -> None:
    model = Model()
    keep(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None

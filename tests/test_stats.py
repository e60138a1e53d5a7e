"""The statistics of a call, and which call `last_stats` returns."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.fallback import FallbackReason, Unserved, report
from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.model_state import state_of
from lookahead_hf.stats import (
    RowStats,
    SourceStats,
    SpeculativeStats,
    last_stats,
    publish,
)


class Model:
    """Anything that a weak reference can be held to."""


def verdict(paths: list[list[int] | None]) -> Verdict:
    """Rows that accept these nodes and emit a bonus token; None is a row that is not live."""
    accepted = [path or [] for path in paths]
    emitted = [0 if path is None else len(path) + 1 for path in paths]
    return Verdict(
        token_offsets=np.cumsum([0, *emitted]),
        token_ids=np.full(sum(emitted), 7),
        path_offsets=np.cumsum([0, *map(len, accepted)]),
        path=np.asarray([node for path in accepted for node in path], np.int32),
        live=np.asarray([path is not None for path in paths]),
        finished=np.asarray([path is None for path in paths]),
    )


def finished(recorder: StatsRecorder, num_text: list[int], **counts: Any) -> SpeculativeStats:
    """The record of a call whose rows have emitted this many tokens."""
    rows = SimpleNamespace(num_text=np.asarray(num_text))
    return recorder.finish(rows, "walk", counts)


def recorded() -> SpeculativeStats:
    """Two rows: a tree and a chain in the first step, one row left for the other two steps."""
    recorder = StatsRecorder(2)
    tree = DraftTree.from_rows([([4, 5, 6], [-1, -1, 0]), ([8, 9], [-1, 0])])
    recorder.observe(tree, verdict([[0, 2], []]), num_moved=1)
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
    assert (stats.num_moved, stats.max_width, stats.engine) == (1, 2, "walk")
    assert stats.fallback_reason is None
    assert stats.tokens_per_step == (9 - 2) / 4
    assert stats.acceptance_rate == 3 / 6


def test_plain_decoding_is_one_token_per_step_in_any_batch() -> None:
    recorder = StatsRecorder(3)
    for live in ([[], [], []], [[], None, []], [[], None, None]):
        recorder.observe(DraftTree.empty(3), verdict(live))  # type: ignore[arg-type]
    stats = finished(recorder, [4, 2, 3])
    assert stats.tokens_per_step == 1.0
    assert stats.max_width == 0


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


def test_text() -> None:
    text = str(recorded())
    assert "1.75 tokens per step: 9 tokens in 3 steps, 2 rows, engine walk" in text
    assert "3 of 6 draft tokens accepted (50%)" in text
    assert "ngram: 3 of 5 accepted, 2 alone" in text
    assert "beams" in str(SpeculativeStats(fallback_reason=FallbackReason.BEAMS))
    assert "nan" not in str(SpeculativeStats(rows=1, num_emitted=1, engine="walk"))


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_latest_call_of_this_thread_comes_first() -> None:
    model, ours, theirs = Model(), SpeculativeStats(rows=1), SpeculativeStats(rows=2)
    found: dict[str, Any] = {}

    def work() -> None:
        found["before"] = last_stats(model)
        publish(model, theirs)
        found["after"] = last_stats(model)

    assert last_stats(model) is None
    publish(model, ours)
    in_thread(work)
    assert found == {"before": ours, "after": theirs}
    assert last_stats(model) is ours
    publish(model, None)
    assert last_stats(model) is None


def test_any_threads_call_where_this_one_made_none() -> None:
    model, theirs = Model(), SpeculativeStats(rows=2)
    in_thread(lambda: publish(model, theirs))
    assert last_stats(model) is theirs


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

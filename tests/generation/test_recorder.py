"""The trace of any call agrees with its text and its statistics."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import lookahead_hf
from lookahead_hf import SpeculativeConfig, SpeculativeStats
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.generation.recorder import OTHER_PROCESS, Tracer
from lookahead_hf.rows import Rows
from lookahead_hf.trace import MODEL, Trace, TraceRow
from lookahead_hf.trace.steps import PARTS
from tests.helpers.compared import served, speculated
from tests.helpers.device import on_device
from tests.helpers.fakes import Recorder
from tests.helpers.models import prompt, tiny
from tests.helpers.random_calls import REPEATABLE, RandomCall, calls
from tests.helpers.scripted import RandomTrees, Scripted, continuations


def test_the_tokens_of_a_trace_are_the_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "transformers")  # which warns of many a setting
    seen: Counter[str] = Counter()

    @settings(REPEATABLE, max_examples=120)
    @given(call=calls())
    def agrees(call: RandomCall) -> None:
        ids = torch.tensor(call.prompt)
        columns = call.columns(ids)
        with lookahead_hf.enabled(call.target) as model:
            plain = generate(model, call, ids)
            if plain is None:
                return
            drafter = Scripted(continuations(plain, columns), RandomTrees(call.drafts))
            config = SpeculativeConfig((drafter,), budget=call.budget, trace=True)
            ours = generate(model, call, ids, streamer=Recorder(), speculative=config)
            stats = served(model)
        assert ours is not None
        check(stats, continuations(ours, columns))
        seen["accepted"] += stats.num_accepted
        seen[str(stats.engine)] += 1
        seen["ragged"] += len({row.num_emitted for row in stats.row_stats}) > 1
        seen["sampled"] += call.settings["do_sample"]
        seen["stop strings"] += call.stop_strings is not None

    agrees()
    kinds = "walk", "lockstep", "ragged", "sampled", "stop strings"
    assert seen["accepted"] > 120 and min(seen[kind] for kind in kinds) > 3, seen


def generate(model: Any, call: RandomCall, ids: torch.Tensor, **ours: Any) -> torch.Tensor | None:
    """The sequences of a call, [rows, columns], or None if it raises, as transformers' may."""
    torch.manual_seed(call.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what transformers says of some settings
        try:
            output = model.generate(**call.arguments(ids), **ours)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
    return output if isinstance(output, torch.Tensor) else output.sequences


def check(stats: SpeculativeStats, texts: list[list[int]]) -> None:
    """Assert that a trace agrees with what its call emitted and counted.

    Args:
        stats: The statistics, with a trace.
        texts: The generated columns of each row, with pads.
    """
    trace = stats.trace
    assert trace is not None and trace.fallback_reason is None
    assert (trace.num_rows, len(trace.steps)) == (stats.rows, stats.num_steps + 1)
    for row, (counts, text) in enumerate(zip(stats.row_stats, texts, strict=True)):
        tokens, origins = trace.tokens(row), trace.origins(row)
        assert len(tokens) == counts.num_emitted
        # Without a pad token, the shortest row's columns are returned.
        assert tokens[: len(text)] == text[: len(tokens)]
        assert len(origins) - origins.count(MODEL) == counts.num_accepted
    traced = [each for step in trace.steps[1:] for each in step.rows]
    assert len(traced) == stats.row_steps
    assert sum(len(each.nodes) for each in traced) == stats.num_drafted
    for each in traced:
        check_row(each)
    for part in PARTS:
        spent = sum(step.parts.get(part, 0.0) for step in trace.steps)
        assert spent == pytest.approx(getattr(stats, f"{part}_ms"), abs=1e-6)
    ends = [step.start_ms + step.total_ms for step in trace.steps]
    assert [step.start_ms for step in trace.steps] == pytest.approx([0.0, *ends[:-1]])
    assert all(sum(step.parts.values()) <= step.total_ms + 1e-6 for step in trace.steps)
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def check_row(each: TraceRow) -> None:
    """Assert that the accepted nodes are a path from the root whose tokens were emitted."""
    assert len(each.tokens) == len(each.accepted) + 1
    at = -1
    for index, token in zip(each.accepted, each.tokens, strict=False):
        node = each.nodes[index]
        assert (node.parent, node.token) == (at, token)
        at = index
    for index, node in enumerate(each.nodes):
        assert -1 <= node.parent < index
        above = 0 if node.parent == -1 else each.nodes[node.parent].depth
        assert node.depth == above + 1
        assert node.sources == ("scripted",)
        assert node.probability is not None and 0 <= node.probability <= 1


def test_the_device_engine_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(2)
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with on_device(monkeypatch), lookahead_hf.enabled(tiny("llama")) as model:
        plain = model.generate(ids, **given, speculative=False)
        drafter = Scripted(continuations(plain, 12), RandomTrees())
        config = SpeculativeConfig((drafter,), budget=8, trace=True)
        ours = model.generate(ids, **given, speculative=config)
        stats = speculated(model)
    assert stats.engine == "device"
    check(stats, continuations(ours, 12))


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_trace_is_kept_where_it_is_asked_for(trace: bool, num_beams: int) -> None:
    """That of a fallback gives the reason alone."""
    config = SpeculativeConfig(trace=trace, on_fallback="silent")
    with lookahead_hf.enabled(tiny("llama")) as model:
        model.generate(prompt(), num_beams=num_beams, max_new_tokens=3, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and (stats.trace is not None) == trace
    assert (stats.to_dict()["trace"] is not None) == trace
    assert stats.fallback_reason == ("beams" if num_beams > 1 else None)
    if trace and num_beams > 1:
        assert stats.trace == Trace(fallback_reason="beams")


def test_a_draft_of_another_process_has_no_sources() -> None:
    rows, tracer = Rows(np.array([[5, 6]])), Tracer(dict.fromkeys(PARTS, 0.0))
    rows.emit(0, 7)
    tracer.observe(DraftTree.from_rows([([8], [-1])]), Verdict.from_rows([[7]], [[]]))
    ((node,),) = (row.nodes for row in tracer.finish(rows, ["ngram"]).steps[0].rows)
    assert node.sources == (OTHER_PROCESS,) and node.probability is None

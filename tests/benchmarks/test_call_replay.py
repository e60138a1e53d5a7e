"""The replay of a text takes the steps of the call that wrote it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.prepared import Request
from lookahead_hf.drafting.registry import build

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def replays() -> Any:
    return importlib.import_module("call_replay")


def opened(folder: str) -> Any:
    return lookahead_hf.enable(AutoModelForCausalLM.from_pretrained(folder).eval())


def called(model: Any, ids: list[int], config: SpeculativeConfig) -> tuple[Any, Any]:
    """The text of a call with what the model expected in it, and the call's statistics."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=NEW_TOKENS, speculative=config,
    )  # fmt: skip
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    tokens = output[0].numpy()
    with torch.no_grad():
        logits = model(output[:, :-1]).logits[0]
    expected = importlib.import_module("record").best_tokens(logits)
    text = importlib.import_module("call_replay").Text
    return text("", 0, tokens[: len(ids)], tokens[len(ids) :], *expected), stats


@pytest.mark.parametrize(
    "fields",
    [
        {"drafters": ("ngram",), "budget": 8},
        {"drafters": ("ngram", "pool"), "learn": True, "budget": 4},
    ],
)
def test_a_replay_takes_the_steps_of_the_call(
    folder: str, fields: dict[str, Any], replays: Any
) -> None:
    config, memory = SpeculativeConfig(**fields), replays.MemoryHolder()
    fresh = opened(folder)  # nothing was learned on it
    accepted = 0
    for ids in ([5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 8], [9, 9, 5, 6]):
        text, stats = called(fresh, ids, config)
        sources = build(Request(config), memory)
        done = replays.replay(text, memory, config, sources, NEW_TOKENS, lambda nodes, length: 1.0)
        assert dict(done.budgets) == stats.budget_histogram
        assert (done.emitted, done.steps) == (stats.num_emitted - 1, stats.num_steps)
        for name, counts in done.sources.items():
            assert counts.accepted == stats.per_source[name].accepted
        accepted += stats.num_accepted
    assert accepted > 0


def test_recorded_logits_are_recycled(folder: str, replays: Any) -> None:
    config = SpeculativeConfig(drafters=("recycling",), budget=8)
    text, stats = called(opened(folder), [5, 6, 7, 5, 6], config)
    steps: list[tuple[int, int]] = []
    done = replays.replay(
        text, replays.MemoryHolder(), config, [replays.RecordedRecycling()], NEW_TOKENS,
        lambda nodes, length: float(steps.append((nodes, length)) or 1),
    )  # fmt: skip
    assert done.sources["recycling"].accepted > 0
    assert stats.num_steps <= done.steps < done.emitted  # rejected nodes teach a call more
    assert [length for _, length in steps][0] == len(text.prompt) + 1 and len(steps) == done.steps

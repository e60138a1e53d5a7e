"""The replay of a text takes the steps of the call that wrote it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.call.prepared import Request
from lookahead_hf.cli.analysis.estimate import likeliest
from lookahead_hf.cli.analysis.replay import MemoryHolder, RecordedRecycling, Text, replay
from lookahead_hf.drafting.registry import build

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return opened(folder)


def opened(folder: str) -> Any:
    return lookahead_hf.enable(AutoModelForCausalLM.from_pretrained(folder).eval())


def called(model: Any, ids: list[int], config: SpeculativeConfig) -> tuple[Text, Any]:
    """The text of a call with what the model expected in it, and the call's statistics."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=NEW_TOKENS, speculative=config,
    )  # fmt: skip
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None
    tokens = output[0].numpy()
    expected = likeliest(model, tokens)
    return Text("", 0, tokens[: len(ids)], tokens[len(ids) :], *expected), stats


@pytest.mark.parametrize(
    "fields",
    [
        {"drafters": ("ngram",), "budget": 8},
        {"drafters": ("ngram", "pool"), "learn": True, "budget": 4},
    ],
)
def test_a_replay_takes_the_steps_of_the_call(model: Any, fields: dict[str, Any]) -> None:
    config, memory = SpeculativeConfig(**fields), MemoryHolder()
    fresh = opened(model.name_or_path)  # nothing was learned on it
    accepted = 0
    for ids in ([5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 8], [9, 9, 5, 6]):
        text, stats = called(fresh, ids, config)
        sources = build(Request(config), memory)
        done = replay(text, memory, config, sources, NEW_TOKENS, lambda nodes, length: 1.0)
        assert dict(done.budgets) == stats.budget_histogram
        assert (done.emitted, done.steps) == (stats.num_emitted - 1, stats.num_steps)
        for name, counts in done.sources.items():
            assert counts.accepted == stats.per_source[name].accepted
        accepted += stats.num_accepted
    assert accepted > 0


def test_recorded_logits_are_recycled(model: Any) -> None:
    config = SpeculativeConfig(drafters=("recycling",), budget=8)
    text, stats = called(model, [5, 6, 7, 5, 6], config)
    recycling = RecordedRecycling()
    steps: list[tuple[int, int]] = []
    done = replay(
        text, MemoryHolder(), config, [recycling], NEW_TOKENS,
        lambda nodes, length: float(steps.append((nodes, length)) or 1),
    )  # fmt: skip
    assert done.sources["recycling"].accepted > 0
    assert stats.num_steps <= done.steps < done.emitted  # rejected nodes teach a call more
    assert [length for _, length in steps][0] == len(text.prompt) + 1 and len(steps) == done.steps


def test_the_likeliest_tokens_are_the_models(model: Any) -> None:
    tokens = np.arange(3, 150)
    ids, probs = likeliest(model, tokens)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens[:-1])[None]).logits[0]
    values, best = logits.softmax(-1).topk(ids.shape[1])
    assert ids.shape == (146, 64)
    assert (ids[:, 0] == best[:, 0].numpy()).all()
    np.testing.assert_allclose(probs[:, 0], values[:, 0], rtol=0.02)  # the search approximates
    assert [part.shape for part in likeliest(None, tokens)] == [(146, 0), (146, 0)]

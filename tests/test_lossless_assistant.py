"""The text is plain's with an assistant at work, alone and in ragged batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lookahead_hf.sources.assistant import AssistantDrafter
from tests.helpers.calls import GREEDY, compare, padded
from tests.helpers.models import VOCAB, characters, prompt, tiny, unsure

SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.5, "top_k": 20}
MODES = pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
BATCHES = pytest.mark.parametrize("kind", ["alone", "left", "holes"])


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    return {"input_ids": prompt()} if kind == "alone" else padded(kind, rows=4)


def translated(model: Any) -> tuple[Any, Any]:
    """A copy of a llama with its vocabulary in another order, and its tokenizer."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in (
            (other.model.embed_tokens, model.model.embed_tokens),
            (other.lm_head, model.lm_head),
        ):
            ours.weight[order] = theirs.weight
    return other, characters(order.tolist())


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_the_target_as_its_own_assistant_is_always_right(name: str) -> None:
    model = tiny(name)
    drafter = AssistantDrafter(model, num_draft=5, min_reach=0.0)
    stats = compare(model, {"input_ids": prompt()}, drafter, **GREEDY)
    # 1 token after the prompt, 6 steps of 5 + 1, and a seventh for the last 3.
    assert stats.accepted_histogram == (0, 0, 1, 0, 0, 6)
    assert stats.per_source["assistant"].exclusive == stats.num_accepted


@MODES
@BATCHES
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_assistant(name: str, kind: str, mode: dict[str, Any]) -> None:
    model = tiny(name)
    drafter = AssistantDrafter(unsure(model))
    stats = compare(model, inputs_of(kind), drafter, **mode)
    assert stats.num_accepted < stats.num_drafted
    assert len({row.row_steps for row in stats.row_stats}) > 1 or kind == "alone"


@MODES
@BATCHES
def test_an_assistant_of_another_vocabulary(kind: str, mode: dict[str, Any]) -> None:
    model = tiny("llama")
    other, tokenizer = translated(model)
    drafter = AssistantDrafter(
        other,
        target_tokenizer=characters(),
        assistant_tokenizer=tokenizer,
        num_draft=5,
        min_reach=0.0,
    )
    stats = compare(model, inputs_of(kind), drafter, **mode)
    if mode is GREEDY:  # it says the same in other words
        assert stats.num_accepted >= 0.9 * stats.num_drafted
        assert stats.accepted_histogram[5] >= 6


def test_one_drafter_object_serves_one_call_after_the_other() -> None:
    model = tiny("llama")
    drafter = AssistantDrafter(unsure(model))
    for kind in ("alone", "left", "alone"):
        compare(model, inputs_of(kind), drafter, **GREEDY)

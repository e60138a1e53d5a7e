"""A user's function that a processor calls is called exactly as in plain generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead_hf
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny
from tests.helpers.users_parts import EditsText


class Returns(LogitsProcessor):
    """Returns what a function makes of the scores."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.make(scores)


@pytest.mark.parametrize("drawn", [{"do_sample": False}, {"do_sample": True, "temperature": 0.6}])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [lambda _: None, lambda _: 3, lambda scores: scores[0]])
def test_a_processor_that_returns_no_scores_raises_plains_error(
    make: Any, rows: int, drawn: dict[str, Any]
) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    call = {"inputs": prompt(rows), "max_new_tokens": 4, "pad_token_id": 0, **drawn}
    call["logits_processor"] = LogitsProcessorList([Returns(make)])
    said = []
    for speculative in (False, True):
        with pytest.raises((TypeError, IndexError, AttributeError)) as raised:
            model.generate(**call, speculative=speculative)
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("rows", [1, 3])
def test_other_processors_hold_the_prompt_that_is_edited(rows: int) -> None:
    """`generate` gives it to them without a copy, and it is the caller's."""
    call = {**GREEDY, "encoder_repetition_penalty": 0.1, "logits_processor": [EditsText()]}
    prompts: list[torch.Tensor] = []

    def arguments() -> dict[str, Any]:
        inputs = padded("left", rows)
        prompts.append(inputs["input_ids"])
        return {**inputs, **call}

    compared(tiny("llama"), arguments, 14)
    of_plain, of_ours = prompts
    assert torch.equal(of_plain, of_ours)
    assert not torch.equal(of_ours, padded("left", rows)["input_ids"])

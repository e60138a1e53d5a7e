"""Processors and criteria that write into `input_ids`: plain's text has it, and so has ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny
from tests.helpers.users_parts import EditsText


class EditsNewest(StoppingCriteria):
    """Changes the newest token before the model reads it."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        newest = input_ids[:, -1]
        newest -= (newest % 6 == 1).long()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("part", ["processor", "criterion", "both"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_text_is_plains(part: str, rows: int, do_sample: bool) -> None:
    call: dict[str, Any] = {**GREEDY, "do_sample": do_sample}
    if part != "criterion":
        call["logits_processor"] = [EditsText()]
    if part != "processor":
        call["stopping_criteria"] = [EditsNewest()]
    # Inputs of each call's own, since plain edits them too.
    stats = compared(tiny("llama"), lambda: {**padded("left", rows), **call}, 14).stats
    assert stats.engine == ("walk" if rows == 1 else "lockstep")


def test_a_padded_text_of_one_row() -> None:
    ids = prompt(1, 14)
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    call = {"attention_mask": mask, **GREEDY, "logits_processor": [EditsText()]}
    compared(tiny("llama"), lambda: {"input_ids": ids * mask, **call}, 14)


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

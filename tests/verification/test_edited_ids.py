"""Processors and criteria that write into `input_ids`: plain's text has it, and so has ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny


class EditsText(LogitsProcessor):
    """Redacts some tokens of prompt and text, and prefers tokens by what it has left."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        input_ids[input_ids % 10 == 3] = 7
        liked = (input_ids.sum(1, keepdim=True) + torch.arange(scores.shape[1])) % 4 == 0
        return scores + 2.0 * liked


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

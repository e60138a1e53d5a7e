"""Calls that tests compare: prompts in a padded batch, settings, and the comparison with plain."""

from __future__ import annotations

from typing import Any

import torch

import lookahead_hf
from lookahead_hf.drafting import Drafter
from tests.helpers.compared import compared
from tests.helpers.models import prompt

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}


WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top-k": {"temperature": 0.8, "top_k": 12},
    "top-p": {"temperature": 0.9, "top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.1},
    "typical": {"top_k": 0, "typical_p": 0.7},
    "penalty": {"top_k": 0, "repetition_penalty": 1.3},
    "mixed": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "no_repeat_ngram_size": 3},
}


def padded(kind: str, rows: int = 3, length: int = 14) -> dict[str, torch.Tensor]:
    """A batch whose rows are padded on the left, on the right, or masked out in places."""
    ids = prompt(rows, length, seed=4)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        pads = 2 * row
        if kind == "left":
            mask[row, :pads] = 0
        elif kind == "right":
            mask[row, -pads:] = 0
        elif kind == "holes":
            mask[row, 3 : 3 + pads] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def compare(
    model: Any, inputs: dict[str, torch.Tensor], drafter: Drafter | None = None, **kwargs: Any
) -> lookahead_hf.SpeculativeStats:
    """Assert that speculation gives plain's text and generator state; return what it did."""
    fields = {} if drafter is None else {"drafters": (drafter,)}
    columns = inputs["input_ids"].shape[1]
    return compared(model, lambda: {**inputs, **kwargs}, columns, **fields).stats


def run(model: Any, rows: int = 1, **settings: Any) -> Any:
    """Generate eight tokens greedily, or what a generation config asks for."""
    ids = prompt(rows)
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    if "generation_config" not in settings:
        call |= {"max_new_tokens": 8, "do_sample": False}
    return model.generate(ids, **{**call, **settings})

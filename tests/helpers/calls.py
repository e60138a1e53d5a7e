"""Calls that tests compare: prompts in a padded batch, settings, and the comparison with plain."""

from __future__ import annotations

from typing import Any

import torch

import lookahead_hf
from tests.helpers.models import prompt
from tests.helpers.scripted import RandomTrees, continuations, scripted

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
    model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any
) -> lookahead_hf.SpeculativeStats:
    """Assert that speculation gives plain's text and generator state; return what it did."""
    columns = inputs["input_ids"].shape[1]
    torch.manual_seed(7)
    plain = model.generate(**inputs, **kwargs)
    after = torch.get_rng_state()
    config = scripted(continuations(plain, columns), RandomTrees())
    torch.manual_seed(7)
    with lookahead_hf.enabled(model):
        ours = model.generate(**inputs, **kwargs, speculative=config)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), after)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    assert stats.num_accepted > 0
    return stats

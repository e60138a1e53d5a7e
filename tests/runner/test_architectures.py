"""Architectures that count, mask or attend in ways of their own have plain's logits.

tests/test_models_table.py runs every architecture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from tests.helpers.architectures import build
from tests.helpers.compared import assert_close, compared, speculated
from tests.helpers.models import prompt

TOLD = ("bart", "moss_transcribe_diarize", "trocr", "whisper")
"""Types whose steps need the columns of their tokens; each counts in another way."""

OWN_WAYS = ("deepseek_v32", "doge", "glm_moe_dsa", "mllama", "moshi")
"""Types with sparse attention, a mask for each head, layers that attend to pictures, or a cache
that drops what the mask allows."""


def ragged(**settings: Any) -> dict[str, Any]:
    """A sampled call of three rows with pads before and inside their prompts."""
    ids = prompt(3, 10, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, 0] = mask[2, 3] = 0
    sampled = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": 24}
    return {"inputs": ids, "attention_mask": mask, **sampled, **settings}


@pytest.mark.parametrize("model_type", [*TOLD, *OWN_WAYS])
@pytest.mark.filterwarnings("ignore")
def test_logits_are_plains(model_type: str) -> None:
    """Texts alone are a weak test: a wrong bias seldom changes a token of a tiny model."""
    shown = {"return_dict_in_generate": True, "output_logits": True}
    both = compared(build(model_type), lambda: ragged(**shown), 10)
    assert_close(both.ours.logits, both.plain.logits, atol=1e-4, rtol=1e-4)
    assert len({row.row_steps for row in both.stats.row_stats}) > 1 and both.stats.num_moved > 0


@pytest.mark.parametrize("model_type", ["bart", "trocr"])
@pytest.mark.filterwarnings("ignore")
def test_what_was_told_is_taken_back(model_type: str) -> None:
    model = build(model_type)
    before = {id(module): dict(vars(module)) for module in model.modules()}
    compared(model, ragged, 10)
    for module in model.modules():
        assert vars(module).keys() == before[id(module)].keys()


@pytest.mark.parametrize("model_type", ["bart", "opt"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_counts_assists(model_type: str) -> None:
    model = build(model_type)
    plain = model.generate(**ragged(do_sample=False))
    config = lookahead_hf.SpeculativeConfig(drafters=("assistant",), budget=8)
    with lookahead_hf.enabled(model):
        call = ragged(do_sample=False, assistant_model=build(model_type), speculative=config)
        assert model.generate(**call).tolist() == plain.tolist()
    assert speculated(model).tokens_per_step > 2

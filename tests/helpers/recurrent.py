"""Model types with recurrent states, and how far their logits are from plain's where it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lookahead_hf.model.facts import facts_of
from tests.helpers.architectures import build
from tests.helpers.compared import compared
from tests.helpers.models import left_padded
from tests.helpers.scripted import RandomChains

QUICK = ("falcon_h1", "jamba", "lfm2", "mamba2", "qwen3_5_text")
"""Types whose layers differ: hybrid ones, the state ignored, convolutions, no attention, delta."""

OTHERS = (
    *("bailing_hybrid", "bamba", "falcon_mamba", "granitemoehybrid", "kimi_linear", "lfm2_moe"),
    *("lfm3", "mamba", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("qwen3_next", "zamba", "zamba2", "zaya"),
)

RECURRENT = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
"""All of them, for `parametrize`."""

HARSH = ((-9.0, 0.0), (-9.0, -4.0), (9.0, 0.0), (0.0, 2.0))
"""Biases of time steps, and logarithms of decays."""

GREEDY = {"do_sample": False, "pad_token_id": 0}


def padded(rows: int) -> dict[str, torch.Tensor]:
    """A prompt of 17 columns, the second and third row padded on the left."""
    return left_padded((0, 4, 9)[:rows], 17, seed=3)


def harsh_gap(model_type: str, num_new: int = 80, **of_mixers: Any) -> float:
    """Return the largest difference of logits from plain's, of models with harsh parameters.

    It is in standard deviations of plain's logits in that step. `of_mixers` are attributes that the
    mixers get.
    """
    return max(_gap(model_type, bias, decay, num_new, of_mixers) for bias, decay in HARSH)


def _gap(
    model_type: str, bias: float, decay: float, num_new: int, of_mixers: dict[str, Any]
) -> float:
    model = build(model_type)
    _make_harsh(model, bias, decay)
    for mixer in facts_of(model).mixers:
        vars(mixer).update(of_mixers)
    asked = {"output_logits": True, "return_dict_in_generate": True}
    call = {**padded(1), **GREEDY, **asked, "max_new_tokens": num_new}
    plain, ours, _ = compared(model, lambda: call, 17, RandomChains())
    pairs = zip(plain.logits, ours.logits, strict=True)
    return max(float((ours - own).abs().max() / own.std()) for own, ours in pairs)


@torch.no_grad()
def _make_harsh(model: Any, bias: float, decay: float) -> None:
    """Let a model's mixers take time steps of one size, forget slowly or fast, and vary widely."""
    for name, each in model.named_parameters():
        if each.dim() > 1 and "embed" not in name:
            each.mul_(2.0)
        if name.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
            each.fill_(bias)
        if name.endswith("A_log"):
            each.fill_(decay)

"""How much of a mixture of experts a step reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead_hf.model.experts import Experts, experts_of
from tests.helpers.architectures import build
from tests.helpers.models import tiny


def test_a_step_reads_the_experts_that_its_tokens_wake() -> None:
    """Against draws: 30,000 times 8 tokens, each of which chooses 2 of 16 experts."""
    experts = Experts(16, 2, 0.75)
    chosen = np.random.default_rng(0).random((30_000, 8, 16)).argsort(-1)[..., :2]
    for count in (1, 3, 8):
        woken = np.mean([len(np.unique(each)) for each in chosen[:, :count]])
        read = (0.25 + 0.75 * woken / 16) / (0.25 + 0.75 * 2 / 16)
        assert experts.growth(np.array([count]))[0] == pytest.approx(read, rel=0.01)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoeshared"]
)
def test_experts_are_found_in_a_model(name: str) -> None:
    model = build(name)
    experts = experts_of(model)
    assert experts is not None and 1 <= experts.per_token < experts.num_experts
    named = sum(each.numel() for key, each in model.named_parameters() if "shared" not in key
                and ".experts." in key)  # fmt: skip
    total = sum(each.numel() for each in model.parameters())
    assert experts.share == pytest.approx(named / total) and named


def test_layers_that_differ_count_as_the_widest_one() -> None:
    """Hunyuan's configuration has a list where others have a number."""
    model = build("hunyuan_v1_moe")
    model.config.moe_topk = [1, 2]
    experts = experts_of(model)
    assert experts is not None and (experts.num_experts, experts.per_token) == (4, 2)


def test_weights_that_other_processes_hold_are_none() -> None:
    """As those of ZeRO-3, whose parameters are empty between forwards."""
    model = tiny("mixtral")
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert experts_of(model) is None


def test_a_dense_model_has_none() -> None:
    assert experts_of(tiny("llama")) is None

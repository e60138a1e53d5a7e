"""Models that quantise activations are recognised, and it is said once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

import lookahead_hf
from lookahead_hf.quantization import quantised_activations
from tests.helpers.models import prompt, tiny

SETTINGS = {"max_new_tokens": 24, "do_sample": False}
BUDGET = lookahead_hf.SpeculativeConfig(budget=8)


class Int8DynamicActivationInt8WeightConfig:
    """Named as torchao's."""


class Int8WeightOnlyConfig:
    """Named as torchao's."""


def compressed(inputs: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def torchao(quant_type: Any) -> SimpleNamespace:
    return SimpleNamespace(quant_method="torchao", quant_type=quant_type)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "LLM.int8"),
        (BitsAndBytesConfig(load_in_4bit=True), None),
        (FineGrainedFP8Config(), "fp8"),
        (FineGrainedFP8Config(dequantize=True), None),
        (torchao(Int8DynamicActivationInt8WeightConfig()), "Int8DynamicActivationInt8WeightConfig"),
        (torchao(Int8WeightOnlyConfig()), None),
        ({"quant_method": "quanto", "weights": "int8", "activations": "int8"}, "quanto, int8"),
        ({"quant_method": "quanto", "weights": "int8", "activations": None}, None),
        (compressed({"num_bits": 8}), "compressed-tensors"),
        (compressed(None), None),
        (
            SimpleNamespace(
                quant_method="compressed-tensors",
                quantization_config=compressed({"num_bits": 8}),
            ),
            "compressed-tensors",
        ),
        ({"quant_method": "gptq", "bits": 4}, None),
        (None, None),
    ],
)
def test_what_a_config_says(config: Any, how: str | None) -> None:
    model = tiny("llama")
    if config is not None:
        model.config.quantization_config = config
    assert quantised_activations(model) == how


@pytest.fixture
def quantised() -> Any:
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves this to another package
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    return lookahead_hf.enable(model)


def test_it_is_said_once(quantised: Any) -> None:
    ids = prompt()
    mask = torch.ones_like(ids)
    quantised.generate(ids, attention_mask=mask, **SETTINGS)
    quantised.generate(ids, attention_mask=mask, **SETTINGS, speculative=False)
    with pytest.warns(UserWarning, match="quantises activations") as caught:
        quantised.generate(ids, attention_mask=mask, **SETTINGS, speculative=BUDGET)
    assert caught[0].filename == __file__
    stats = lookahead_hf.last_stats(quantised)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    quantised.generate(ids, attention_mask=mask, **SETTINGS, speculative=BUDGET)


def test_a_model_that_is_quantised_after_its_first_call() -> None:
    ids = prompt()
    call = {"attention_mask": torch.ones_like(ids), **SETTINGS, "speculative": BUDGET}
    model = lookahead_hf.enable(tiny("llama"))
    model.generate(ids, **call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    with pytest.warns(UserWarning, match="quantises activations"):
        model.generate(ids, **call)


def test_of_others_nothing_is_said() -> None:
    ids = prompt()
    model = lookahead_hf.enable(tiny("llama"))
    model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS, speculative=BUDGET)

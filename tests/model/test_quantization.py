"""Models that quantise activations are recognised, with one warning."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

import lookahead_hf
from lookahead_hf.model.limits import quantised_activations
from tests.helpers.calls import run
from tests.helpers.compared import speculated
from tests.helpers.models import prompt, tiny

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
        (torchao(Int8DynamicActivationInt8WeightConfig()), "Int8DynamicActivationInt8WeightConfig"),
        (torchao(Int8WeightOnlyConfig()), None),
        ({"quant_method": "quanto", "weights": "int8", "activations": "int8"}, "quanto, int8"),
        ({"quant_method": "quanto", "weights": "int8", "activations": None}, None),
        (compressed({"num_bits": 8}), "compressed-tensors"),
        (compressed(None), None),
        (None, None),
    ],
)
def test_what_a_config_says(config: Any, how: str | None) -> None:
    model = tiny("llama")
    if config is not None:
        model.config.quantization_config = config
    assert quantised_activations(model) == how


def quantise(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves this to another package
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def test_one_warning_about_what_is_quantised_now() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    run(model, max_new_tokens=24, speculative=BUDGET)  # nothing is said
    quantise(model)
    run(model)
    run(model, speculative=False)
    with pytest.warns(UserWarning, match="quantises activations") as caught:
        ids = prompt()
        model.generate(ids, max_new_tokens=24, do_sample=False, speculative=BUDGET)
    assert caught[0].filename == __file__
    speculated(model)
    run(model, speculative=BUDGET)

"""Models that quantise activations are recognised by their checkpoints, with one warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

import lookahead_hf
from lookahead_hf.model import compat
from tests.helpers.calls import run
from tests.helpers.compared import speculated
from tests.helpers.models import prompt, tiny

BUDGET = lookahead_hf.SpeculativeConfig(budget=8)


def compressed(inputs: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def torchao(quant_type: str) -> SimpleNamespace:
    kind = type(quant_type, (), {})
    return SimpleNamespace(quant_method="torchao", quant_type=kind())


@pytest.mark.parametrize(
    ("config", "rounds"),
    [
        (None, False),
        (BitsAndBytesConfig(load_in_8bit=True), True),
        (BitsAndBytesConfig(load_in_4bit=True), False),
        (FineGrainedFP8Config(), True),
        (FineGrainedFP8Config(dequantize=True), False),
        (torchao("Int8DynamicActivationInt8WeightConfig"), True),
        (torchao("Int8WeightOnlyConfig"), False),
        ({"quant_method": "quanto", "weights": "int8", "activations": "int8"}, True),
        ({"quant_method": "quanto", "weights": "int8", "activations": None}, False),
        (compressed({"num_bits": 8}), True),
        (compressed(None), False),
    ],
)
def test_what_a_checkpoint_says(config: Any, rounds: bool) -> None:
    model = SimpleNamespace(config=SimpleNamespace(quantization_config=config))
    assert compat.rounds_activations(model) is rounds


def test_one_warning_when_a_call_speculates() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    model.config.quantization_config = FineGrainedFP8Config()
    run(model)
    run(model, speculative=False)
    with pytest.warns(UserWarning, match="quantises activations") as caught:
        model.generate(prompt(), max_new_tokens=24, do_sample=False, speculative=BUDGET)
    assert caught[0].filename == __file__
    speculated(model)
    run(model, speculative=BUDGET)

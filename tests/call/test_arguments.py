"""The arguments of a call: their names, the settings they amount to, and predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import lookahead_hf
from lookahead_hf.call.arguments import GenerateArguments, read_prediction
from tests.helpers.compared import served
from tests.helpers.models import VOCAB, characters, prompt, tiny

IDS = [5, 6, 7]


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (IDS, [IDS]),
        (tuple(IDS), [IDS]),
        (torch.tensor(IDS), [IDS]),
        (np.asarray(IDS, np.int32), [IDS]),
        ([torch.tensor(each) for each in IDS], [IDS]),
        ([np.int64(each) for each in IDS], [IDS]),
        ([IDS, [8]], [IDS, [8]]),
        ([torch.tensor(IDS), np.asarray([8])], [IDS, [8]]),
        (torch.tensor([IDS, IDS]), [IDS, IDS]),
        (np.asarray([IDS]), [IDS]),
        ([IDS, []], [IDS, []]),
        ([], [[]]),
        (torch.empty(0), [[]]),
        ("&'(", [IDS]),
        (["&'(", ")"], [IDS, [8]]),
        (["&'(", [8]], [IDS, [8]]),
    ],
    ids=repr,
)
def test_predictions(prediction: Any, expected: list[list[int]]) -> None:
    rows = read_prediction(prediction, characters())
    assert [row.tolist() for row in rows] == expected
    assert all(row.dtype == np.int64 and row.ndim == 1 for row in rows)


@pytest.mark.parametrize(
    "prediction",
    [
        3,
        ...,
        {5: 6},
        [0.5],
        torch.tensor([0.5]),
        torch.tensor([0.5], requires_grad=True),
        [True, False],
        [5, -1],
        [5, [6]],
        [5, "a"],
        [[[5]]],
        torch.zeros(1, 2, 3, dtype=torch.long),
        [None],
        torch.tensor(5),
    ],
    ids=repr,
)
def test_what_is_no_prediction(prediction: Any) -> None:
    with pytest.raises(ValueError, match="prediction holds .* token ids"):
        read_prediction(prediction, characters())


def test_a_text_needs_a_tokenizer() -> None:
    for prediction in ("abc", ["abc", "d"]):
        with pytest.raises(ValueError, match="`tokenizer=`"):
            read_prediction(prediction)
    processor = SimpleNamespace(tokenizer=characters())
    assert [row.tolist() for row in read_prediction("&'(", processor)] == [IDS]


def test_ids_that_the_model_does_not_have() -> None:
    model = lookahead_hf.enable(tiny("llama"))
    for guess in ([[5, VOCAB]], torch.tensor([VOCAB + 7, 3])):
        with pytest.raises(ValueError, match=r"token id 10\d, but the model has the ids 0 to 99"):
            model.generate(prompt(), max_new_tokens=4, speculative=True, prediction=guess)
    model.generate(prompt(), max_new_tokens=4, speculative=True, prediction=[VOCAB - 1])
    served(model)


@pytest.mark.parametrize("name", ["max_new_token", "temperatur", "nonsense"])
def test_a_misspelt_argument_of_transformers_is_left_to_it(name: str) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    with pytest.raises(ValueError, match="not used by the model"):
        model.generate(prompt(), speculative=True, **{name: 3})


@pytest.mark.parametrize("fixed", [False, True])
def test_arguments_of_a_bare_wrapper_get_transformers_names(fixed: bool) -> None:
    def bare(*args: Any, **kwargs: Any) -> None: ...

    def with_inputs(inputs: Any, *args: Any, **kwargs: Any) -> None: ...

    wrapper = with_inputs if fixed else bare
    ids, config = prompt(), GenerationConfig(top_k=3)
    found = GenerateArguments(tiny("llama"), wrapper, (ids, config), {"top_p": 0.5})
    assert found.given == {"inputs": ids, "generation_config": config, "top_p": 0.5}
    assert found.setting("top_k") == 3


def test_settings_equal_what_generate_prepares() -> None:
    """Every setting that decides about fallback or conflicts, against transformers' own merge."""
    model = tiny("llama")
    model.generation_config.update(num_beams=2, output_scores=True)
    config = GenerationConfig(num_beams=3, guidance_scale=1.5)
    for kwargs in ({}, {"generation_config": config}, {"num_beams": 1, "use_cache": False}):
        prepared, _ = model._prepare_generation_config(**{"generation_config": None, **kwargs})
        found = GenerateArguments(model, model.generate, (), kwargs)
        for name in ("num_beams", "use_cache", "guidance_scale", "penalty_alpha", "stop_strings"):
            assert found.setting(name) == getattr(prepared, name), name
    assert (
        GenerateArguments(model, model.generate, (), {"num_beams": None}).setting("num_beams")
        is None
    )

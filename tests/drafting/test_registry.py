"""Drafters by name, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf import SpeculativeConfig, drafting
from lookahead_hf.call.prepared import Request
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.registry import build
from tests.helpers.models import tiny

GUESS = [np.array([1, 2, 3])]


def names_of(drafters: list[Drafter]) -> list[str]:
    return [drafter.name for drafter in drafters]


@pytest.mark.parametrize(
    ("drafters", "predictions", "expected"),
    [
        (None, None, ["ngram", "recycling"]),
        (None, GUESS, ["prediction", "ngram", "recycling"]),
        (["recycling"], None, ["recycling"]),
        (["ngram", "prediction"], GUESS, ["ngram", "prediction"]),
        (["ngram", "prediction"], None, ["ngram"]),
        (["prediction"], None, []),
    ],
)
def test_names_become_drafters(drafters: Any, predictions: Any, expected: list[str]) -> None:
    request = Request(SpeculativeConfig(drafters), prediction=predictions)
    assert names_of(build(request)) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_draft_where_they_are_asked_for(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they draft one operation after the other; no default has them, and a caller may."""
    model, assistant = tiny("llama"), tiny("llama")
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device(device)))
    assert names_of(build(Request(SpeculativeConfig()), model)) == ["ngram", "recycling"]
    asked = Request(SpeculativeConfig(), assistant_model=assistant)
    assert names_of(build(asked, model)) == ["ngram", "recycling", "assistant"]


def test_options_reach_the_drafter_of_their_name() -> None:
    config = SpeculativeConfig(options={"recycling": {"size": 3}})
    with pytest.raises(ValueError, match="'recycling'.*'size'"):
        build(Request(config))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("recycling", "keep", 1), ("recycling", "top_k", 65)]
    + [("recycling", "num_next", 0), ("recycling", "capacity", 0)]
    + [("lookahead", "window", 0), ("lookahead", "ngram_size", 1), ("lookahead", "num_ngrams", 65)]
    + [("assistant", "num_draft", 0), ("assistant", "min_reach", 1.0)],
)
def test_options_out_of_range_are_named(name: str, option: str, value: Any) -> None:
    config = SpeculativeConfig((name,), options={name: {option: value}})
    assistant = tiny("llama") if name == "assistant" else None
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        build(Request(config, assistant_model=assistant))


def test_every_public_name_can_be_imported() -> None:
    for name in drafting.__all__:
        assert getattr(drafting, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = drafting.nothing


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, lookahead_hf.drafting, lookahead_hf.drafting.registry\n"
        "assert not {'torch', 'numba', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warming_up_compiles_all_that_a_call_needs() -> None:
    code = (
        "from tests.helpers.drafts import draft_two_steps\n"
        "from lookahead_hf.ngram_pool import compilation\n"
        "from lookahead_hf.drafting import _numba\n"
        "from lookahead_hf.drafting.sources import _recycling_numba\n"
        "from lookahead_hf.ngram_pool import logits_memory\n"
        "modules = (_numba, _recycling_numba, logits_memory)\n"
        "count = lambda: [{k: len(v.signatures) for k, v in vars(m).items()\n"
        "                  if hasattr(v, 'signatures')} for m in modules]\n"
        "compilation.wait([compilation.drafting])\n"
        "before = count()\n"
        "draft_two_steps()\n"
        "assert count() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Mixers whose blocks differ from single tokens in some corner are found out, and no others."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lookahead_hf.model.facts import facts_of
from lookahead_hf.model_state import state_of
from lookahead_hf.support import self_test
from tests.helpers.architectures import build
from tests.helpers.recurrent import RECURRENT

pytestmark = pytest.mark.filterwarnings("ignore")

STEPWISE = ("falcon_mamba", "jamba", "mamba", "nemotron_h", "zamba", "zamba2")
"""Types whose forward of several tokens ignores the state, or limits time steps."""


def stepwise(model: Any) -> set[int]:
    """The mixers that have to get the tokens of a block one by one, by a new self test."""
    state_of(model).trials.clear()
    assert self_test.refusal(model) == ("", "")
    (found,) = state_of(model).stepwise_mixers.values()
    return set(found)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_sound_mixers_get_whole_blocks(model_type: str) -> None:
    model = build(model_type)
    every = {*range(len(facts_of(model).mixers))}
    assert stepwise(model) == (every if model_type in STEPWISE else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_limit_of_time_steps_for_blocks_alone_is_found(dtype: torch.dtype) -> None:
    model = build("zamba2").to(dtype)
    assert stepwise(model) == {*range(len(facts_of(model).mixers))}
    for module in facts_of(model).mixers:
        module.time_step_limit = (0.0, float("inf"))
    assert stepwise(model) == set()


def delta_rule(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change arguments of the delta rule, by name, for several tokens."""
    return "qwen3_5_text", "qwen3_5", "torch_chunk_gated_delta_rule", changes


def mamba2(**changes: Callable[[Any], Any]) -> Any:
    """Change arguments of Mamba 2's scan, by name, for several tokens."""
    return "bamba", "bamba", "mamba2_chunk_scan", changes


@pytest.mark.parametrize(
    ("model_type", "room", "name", "changes"),
    [
        delta_rule(g=lambda g: g.clamp(min=-5.0)),
        delta_rule(g=lambda g: g.clamp(max=-0.01)),
        delta_rule(g=lambda g: g.bfloat16().float()),
        delta_rule(beta=lambda beta: beta.clamp(max=0.95)),
        delta_rule(beta=lambda beta: beta.clamp(min=0.05)),
        mamba2(dt_limit=lambda _: (0.001, float("inf"))),
        mamba2(dt_limit=lambda _: (0.0, 8.0)),
        mamba2(dt_bias=lambda bias: bias.clamp(max=4.0)),
        mamba2(D=lambda d: d * 1.001),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_what_differs_for_several_tokens_in_a_corner_is_found(
    model_type: str, room: str, name: str, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(model_type)
    module = importlib.import_module(f"transformers.models.{room}.modeling_{room}")
    own = getattr(module, name)

    @functools.wraps(own)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, **{k: change(kwargs[k]) for k, change in changes.items()}})

    monkeypatch.setattr(module, name, changed)
    assert stepwise(model) == {*range(len(facts_of(model).mixers))}

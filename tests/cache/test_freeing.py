"""What is kept of a model between calls is freed, however speculation was turned on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.runner import recorded
from tests.helpers.models import prompt, tiny


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def kept_of(model: Any, generate: Callable[..., Any]) -> list[Any]:
    """What is kept of a model after a call of which something is kept."""
    config = {"recorded_steps": True, "packed_weights": False}
    generate(prompt(), max_new_tokens=12, do_sample=False, speculative=config)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.graphs == "recorded"
    return list(recorded._kept)


def test_what_was_kept_is_freed_where_enabled_ends(model: Any) -> None:
    with lookahead_hf.enabled(model):
        assert model in kept_of(model, model.generate)
    assert model not in recorded._kept
    lookahead_hf.enable(model)
    with lookahead_hf.enabled(model):
        assert model in kept_of(model, model.generate)
    assert model in recorded._kept, "it is enabled still"
    lookahead_hf.disable(model)
    assert model not in recorded._kept


def test_disable_frees_what_other_ways_have_kept(model: Any) -> None:
    assert model in kept_of(model, functools.partial(lookahead_hf.generate, model))
    lookahead_hf.disable(model)
    assert model not in recorded._kept


def test_disabling_everywhere_frees_what_was_kept_of_models_not_enabled(model: Any) -> None:
    enabled, other = lookahead_hf.enable(tiny("llama")), tiny("llama")
    lookahead_hf.enable_everywhere()
    for each in (model, enabled):
        assert each in kept_of(each, each.generate)
    assert other in kept_of(other, functools.partial(lookahead_hf.generate, other))
    lookahead_hf.disable_everywhere()
    assert [each in recorded._kept for each in (model, enabled, other)] == [False, True, False]

"""What is kept of a model between calls is freed, however speculation was turned on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.engines.cpu.layers import CompiledLayers
from lookahead_hf.model.state import state_of
from tests.helpers.compared import served
from tests.helpers.models import prompt, tiny


def is_kept(model: Any) -> bool:
    return state_of(model).get(CompiledLayers) is not None


def keeps(model: Any, generate: Callable[..., Any]) -> bool:
    """Whether a call keeps something."""
    call = {"max_new_tokens": 40, "do_sample": False, "speculative": {"compiled_layers": True}}
    generate(prompt(), **call)
    assert served(model).execution == "compiled"
    return is_kept(model)


def test_what_is_kept_is_freed_where_speculation_is_turned_off(model: Any) -> None:
    with lookahead_hf.enabled(model):
        assert keeps(model, model.generate)
    assert not is_kept(model)
    lookahead_hf.enable(model)
    with lookahead_hf.enabled(model):
        assert keeps(model, model.generate)
    assert is_kept(model), "it is enabled still"
    lookahead_hf.disable(model)
    assert not is_kept(model)
    assert keeps(model, functools.partial(lookahead_hf.generate, model))
    lookahead_hf.disable(model)
    assert not is_kept(model)


def test_disable_everywhere_frees_what_is_kept_of_models_not_enabled(model: Any) -> None:
    enabled, other = lookahead_hf.enable(tiny("llama")), tiny("llama")
    lookahead_hf.enable_everywhere()
    for each in (model, enabled):
        assert keeps(each, each.generate)
    assert keeps(other, functools.partial(lookahead_hf.generate, other))
    lookahead_hf.disable_everywhere()
    assert [is_kept(each) for each in (model, enabled, other)] == [False, True, False]


def test_freed_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    library = SimpleNamespace(malloc_trim=trimmed.append)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    lookahead_hf.disable(lookahead_hf.enable(tiny("llama")))
    assert trimmed == [0]

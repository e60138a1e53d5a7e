"""A wrong value of an argument raises one error that names it, before any work is done."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.config import (
    BUILT_IN_DRAFTERS,
    CHOICES,
    DEFAULT_DRAFTERS,
    MOST_DRAFT_NODES,
    PRESETS,
)
from lookahead_hf.drafting.sources.recycling import MAX_TOP_K
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.models import prompt, tiny

pytestmark = pytest.mark.filterwarnings("ignore:steps are no longer recorded")

AWKWARD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 65, 2**70, 0.0, 1.5, math.nan, math.inf, 1j, "", "auto", "ngram",
    "exact", "warn", "default", b"ngram", [], ["ngram"], ("ngram", "ngram"), ("pool",), {}, set(),
    {"ngram"}, {"ngram": {}}, {"ngram": 3}, {"ngram": {3: 4}}, {"budget": -1}, int,
    NgramPool, print, Ellipsis, range(3), Path("nowhere/pool"), SimpleNamespace(propose=3),
    np.array([1, 2]), np.array([]), np.array("auto"), np.int64(3), np.bool_(True),
    torch.tensor(3), torch.tensor([1, 2]), torch.tensor([]), torch.ones(2, dtype=torch.bfloat16),
    [2**63], torch.nn.Linear(1, 1),
)  # fmt: skip
"""Values that trip up comparisons, truth tests, iteration and `isinstance`."""

_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.one_of(
    st.sampled_from(AWKWARD),
    st.recursive(
        _scalars,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)

fuzzed = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def is_int(value: Any, least: int, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def is_text(value: Any, allowed: tuple[str, ...]) -> bool:
    return type(value) is str and value in allowed


def are_drafters(value: Any) -> bool:
    if type(value) not in (list, tuple) or not value:
        return value is None
    return all(is_text(each, BUILT_IN_DRAFTERS) for each in value) and len(set(value)) == len(value)


def are_options(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        is_text(name, (*DEFAULT_DRAFTERS, "prediction", "assistant"))
        and isinstance(options, Mapping)
        and all(type(key) is str for key in options)
        for name, options in value.items()
    )


def is_auto_or_bool(value: Any) -> bool:
    return type(value) is bool or is_text(value, ("auto",))


FIELDS: dict[str, Callable[[Any], bool]] = {
    "drafters": are_drafters,
    "max_draft_nodes": lambda value: is_int(value, 1, MOST_DRAFT_NODES),
    "budget": lambda value: is_text(value, ("auto",)) or is_int(value, 0, 64),
    "verification": lambda value: is_text(value, CHOICES["verification"]),
    "draft_invariant": lambda value: type(value) is bool,
    **dict.fromkeys(("cuda_graphs", "recorded_steps", "packed_weights"), is_auto_or_bool),
    "pool": lambda value: value is None or isinstance(value, (str, os.PathLike)),
    "learn": lambda value: value is False,  # without a pool there is nothing to learn
    "on_fallback": lambda value: is_text(value, CHOICES["on_fallback"]),
    "options": are_options,
}
"""What each field allows of `VALUES`."""

OPTIONS: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("ngram", "min_ngram"): lambda value: is_int(value, 1, 32),
    ("ngram", "max_ngram"): lambda value: is_int(value, 1, 32),
    ("pool", "min_ngram"): lambda value: is_int(value, 1, 32),
    ("recycling", "top_k"): lambda value: is_int(value, 1, MAX_TOP_K),
    ("recycling", "num_next"): lambda value: is_int(value, 1, MAX_TOP_K),
    ("recycling", "capacity"): lambda value: is_int(value, 1, 2**24),
    ("recycling", "keep"): lambda value: value is False,
    ("lookahead", "window"): lambda value: is_int(value, 1, 64),
    ("lookahead", "ngram_size"): lambda value: is_int(value, 2, 64),
    ("lookahead", "num_ngrams"): lambda value: is_int(value, 1, 64),
    ("assistant", "num_draft"): lambda value: value is None or is_int(value, 1, 64),
    ("assistant", "top_k"): lambda value: value is None or is_int(value, 1, 64),
    ("assistant", "beam"): lambda value: is_int(value, 1, 64),
    ("assistant", "min_reach"): lambda value: type(value) in (int, float) and 0 <= value < 1,
}
"""What each drafter's option allows of them."""


class Model:
    """A model whose forwards are counted, and whose traces are compared."""

    def __init__(self) -> None:
        self.model = lookahead_hf.enable(tiny("llama", num_hidden_layers=1))
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)
        self.generate(speculative=True)  # a first call looks whether the model can be served
        self.state = self._state()

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _state(self) -> tuple[Any, ...]:
        model = self.model
        configs = model.config.to_dict(), model.generation_config.to_dict()
        return set(vars(model)), *configs, torch.get_rng_state().tolist()

    def generate(self, **kwargs: Any) -> torch.Tensor:
        settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        return self.model.generate(prompt(), **settings, **kwargs)

    def refuses(self, word: str | tuple[str, ...], call: Callable[[], Any]) -> None:
        """Assert that a call raises one error that names the argument, and does nothing else."""
        before = self.forwards
        with pytest.raises((ValueError, TypeError, OSError)) as raised:
            call()
        assert_says(word, raised.value)
        assert self.forwards == before
        assert self._state() == self.state


def refused(word: str, call: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert_says(word, raised.value)


def assert_says(word: str | tuple[str, ...], error: Exception) -> None:
    assert any(each in str(error) for each in ((word,) if isinstance(word, str) else word))
    assert "truth value" not in str(error)  # what arrays answer where a bool is asked for


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    yield Model()


@fuzzed
@given(name=st.sampled_from(sorted(FIELDS)), value=VALUES)
def test_fields_of_a_configuration(name: str, value: Any) -> None:
    if FIELDS[name](value):
        SpeculativeConfig(**{name: value})
    else:
        refused(name.removesuffix("s"), lambda: SpeculativeConfig(**{name: value}))


def test_every_field_is_fuzzed() -> None:
    assert set(FIELDS) == set(SpeculativeConfig().to_dict())


def is_speculative(value: Any) -> bool:
    """Whether `speculative=` takes the value."""
    if isinstance(value, dict):
        return all(name in FIELDS and FIELDS[name](field) for name, field in value.items())
    return value is None or type(value) is bool or is_text(value, tuple(PRESETS))


def words_for(value: Any) -> tuple[str, ...]:
    """Return words of the error for a wrong `speculative=`; for a dict, one of its fields."""
    if isinstance(value, dict):
        return "has no field", *(name[:-1] for name in FIELDS if name in value)
    return ("speculative",)


@fuzzed
@given(value=VALUES | st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES, max_size=2))
def test_speculative(model: Model, value: Any) -> None:
    if is_speculative(value):
        return
    words = words_for(value)
    model.refuses(words, lambda: model.generate(speculative=value))
    model.refuses(words, lambda: lookahead_hf.generate(model.model, prompt(), speculative=value))
    model.refuses(words, lambda: lookahead_hf.set_default(model.model, value))


@fuzzed
@given(value=VALUES)
def test_a_prediction_is_served_or_refused(model: Model, value: Any) -> None:
    """A prediction has no effect on the text, or it raises an error that names it."""
    before = model.forwards
    try:
        output = model.generate(speculative=True, prediction=value)
    except ValueError as error:
        assert "prediction" in str(error)
        assert model.forwards == before
    else:
        assert torch.equal(output, model.generate())


@fuzzed
@given(option=st.sampled_from(sorted(OPTIONS)), value=VALUES)
def test_options_of_drafters(model: Model, option: tuple[str, str], value: Any) -> None:
    drafter, name = option
    if OPTIONS[option](value):
        return
    config = SpeculativeConfig((drafter,), options={drafter: {name: value}})
    given = {"assistant_model": model.model} if drafter == "assistant" else {}
    model.refuses(name, lambda: model.generate(speculative=config, **given))


@pytest.mark.parametrize("value", AWKWARD[1:], ids=repr)
def test_an_assistant_that_is_no_model(model: Model, value: Any) -> None:
    call = {"speculative": True, "assistant_model": value}
    model.refuses("assistant_model must be", lambda: model.generate(**call))

"""A wrong value of an argument raises one error that names it, before any work is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lookahead_hf
from lookahead_hf import SpeculativeConfig
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.models import prompt, tiny
from tests.helpers.random_calls import REPEATABLE

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

fuzzed = settings(REPEATABLE, max_examples=200)


FIELDS = tuple(SpeculativeConfig().to_dict())
OPTIONS = {
    "ngram": "min_ngram max_ngram",
    "pool": "min_ngram",
    "recycling": "top_k num_next capacity keep",
    "lookahead": "window ngram_size num_ngrams",
    "assistant": "num_draft top_k beam min_reach",
}
"""The options of each drafter."""


class Model:
    """A model whose forwards are counted, and whose traces are compared."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # as every test begins
        self.model = lookahead_hf.enable(tiny("llama", num_hidden_layers=1))
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)
        self.plain = self.generate()
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
        with pytest.raises((ValueError, TypeError, OSError)):
            self.serves_or_refuses(word, call, is_raised=True)

    def serves_or_refuses(
        self, word: str | tuple[str, ...], call: Callable[[], Any], is_raised: bool = False
    ) -> None:
        """Assert that a call writes plain's text, or raises such an error and does nothing else."""
        before = self.forwards
        try:
            output = call()
        except (ValueError, TypeError, OSError) as error:
            assert_says(word, error)
            assert self.forwards == before
            if is_raised:
                raise
        else:
            assert is_raised or torch.equal(output, self.plain)
        assert self._state() == self.state


def assert_says(word: str | tuple[str, ...], error: Exception) -> None:
    assert any(each in str(error) for each in ((word,) if isinstance(word, str) else word))
    assert "truth value" not in str(error)  # what arrays answer where a bool is asked for


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def words_for(value: Any) -> tuple[str, ...]:
    """Return words of the error for a wrong `speculative=`; for a dict, one of its fields."""
    if isinstance(value, dict):
        return "has no argument", *(name[:-1] for name in FIELDS if name in value)
    return ("speculative",)


@fuzzed
@given(value=VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
def test_speculative(model: Model, value: Any) -> None:
    words = words_for(value)
    model.serves_or_refuses(words, lambda: model.generate(speculative=value))


@fuzzed
@given(value=VALUES)
def test_a_prediction(model: Model, value: Any) -> None:
    call = {"speculative": True, "prediction": value}
    model.serves_or_refuses("prediction", lambda: model.generate(**call))


@fuzzed
@given(
    option=st.sampled_from([(of, name) for of in OPTIONS for name in OPTIONS[of].split()]),
    value=VALUES,
)
def test_options_of_drafters(model: Model, option: tuple[str, str], value: Any) -> None:
    drafter, name = option
    config = SpeculativeConfig((drafter,), options={drafter: {name: value}})
    given = {"assistant_model": model.model} if drafter == "assistant" else {}
    model.serves_or_refuses(name, lambda: model.generate(speculative=config, **given))


@pytest.mark.parametrize("value", AWKWARD[1:], ids=repr)
def test_an_assistant_that_is_no_model(model: Model, value: Any) -> None:
    call = {"speculative": True, "assistant_model": value}
    model.refuses("assistant_model must be", lambda: model.generate(**call))

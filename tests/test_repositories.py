"""Which functions of a repository leave decoding to transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import GenerationMixin

from lookahead_hf.repositories import hands_on


def by_class(model: Any, *args: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, *args, **kwargs)


def by_super(model: Any, **kwargs: Any) -> Any:
    return super(type(model), model).generate(use_cache=True, **kwargs)


@functools.wraps(by_class)
def decorated(*args: Any, **kwargs: Any) -> Any:
    return by_class(*args, **kwargs)


def loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
    return model(input_ids, **kwargs).logits.argmax(-1)


def with_a_strategy(model: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, custom_generate=loop, **kwargs)


def with_a_choice(model: Any, custom_generate: Any = None, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, **kwargs)


def by_item(model: Any, **kwargs: Any) -> Any:
    kwargs["custom_generate"] = loop
    return GenerationMixin.generate(model, **kwargs)


def with_some(model: Any, input_ids: Any) -> Any:
    return GenerationMixin.generate(model, input_ids)


@pytest.mark.parametrize("function", [by_class, by_super, decorated])
def test_arguments_are_handed_on(function: Any) -> None:
    assert hands_on(function)


@pytest.mark.parametrize(
    "function", [loop, with_a_strategy, with_a_choice, by_item, with_some, print, object()]
)
def test_decoding_is_not_left_to_transformers(function: Any) -> None:
    assert not hands_on(function)

"""`SpeculativeConfig`: what it allows, how it is stored and resolved."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_hf.config import (
    BUILT_IN_DRAFTERS,
    DEFAULT_DRAFTERS,
    PRESETS,
    SpeculativeConfig,
    drafter_name,
)

OBJECT = SimpleNamespace(propose=print, name="mine")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafters": 3}, "holds 3, which is neither"),
        ({"drafters": ()}, "speculative=False"),
        ({"drafters": ("ngrams",)}, "known: ngram, recycling"),
        ({"drafters": ("ngram", "ngram")}, "duplicate: 'ngram'"),
        ({"drafters": (object(),)}, "method `propose`"),
        ({"drafters": (type("Mine", (), {"propose": print}),)}, "neither"),
        ({"max_draft_nodes": 0}, "int in 1..4096"),
        ({"budget": "much"}, 'must be "auto" or an int in 0..64'),
        ({"budget": 65}, "int in 0..64"),
        ({"verification": "sure"}, "known: exact, rejection"),
        ({"draft_invariant": 1}, "known: True, False"),
        ({"compiled_layers": "yes"}, "known: True, False"),
        ({"draft_invariant": True, "verification": "rejection"}, 'needs verification="exact"'),
        ({"on_fallback": "raise"}, "known: warn, error, silent"),
        ({"learn": True}, "pass pool= too"),
        ({"options": ["ngram"]}, "must be a dict"),
        ({"options": {"ngrams": {}}}, "there is no such drafter"),
        ({"options": {"recycling": {}}, "drafters": ("ngram",)}, "does not draft with it"),
        ({"options": {"mine": {}}, "drafters": (OBJECT,)}, "a Drafter object gets its options"),
        ({"options": {"ngram": {3: 4}}}, "must be a dict with names"),
    ],
)
def test_values_that_are_not_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**fields)


def test_values_that_are_allowed() -> None:
    config = SpeculativeConfig(
        drafters=["ngram", OBJECT],  # type: ignore[arg-type]
        max_draft_nodes=1,
        budget=0,
        options={"ngram": {"depth": 3}, "prediction": {}, "assistant": {}},
    )
    SpeculativeConfig(drafters=("pool",), learn=True, options={"pool": {}})
    SpeculativeConfig(pool="texts.pool", learn=True, options={"pool": {}})
    assert config.drafters == ("ngram", OBJECT)
    assert [drafter_name(drafter) for drafter in config.drafters] == ["ngram", "mine"]


def test_it_is_frozen_and_keeps_what_it_was_given() -> None:
    options: dict[str, dict[str, Any]] = {"ngram": {"depth": 3}}
    config = SpeculativeConfig(options=options)
    options["ngram"]["depth"] = 4
    assert config.options == {"ngram": {"depth": 3}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 3  # type: ignore[misc]


FULL = SpeculativeConfig(
    ("ngram",), 32, 8, on_fallback="error", options={"ngram": {"sizes": (2, 3)}}
)


@pytest.mark.parametrize("config", [SpeculativeConfig(), FULL])
def test_through_json_and_back(config: SpeculativeConfig) -> None:
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored == config.to_dict()
    back = SpeculativeConfig.from_dict(stored)
    assert back.to_dict() == stored
    assert back.drafters == config.drafters
    assert SpeculativeConfig.resolve(stored) == SpeculativeConfig.resolve_stored(stored) == back


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"drafters": ("ngram", OBJECT)}, r"drafters\[1\]"),
        ({"options": {"ngram": {"index": OBJECT}}}, r"options\['ngram'\]\['index'\]"),
    ],
)
def test_objects_are_refused_by_name_when_stored(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=where):
        SpeculativeConfig(**fields).to_dict()
    with pytest.raises(ValueError, match=where):
        SpeculativeConfig.from_dict(fields)


def test_resolve() -> None:
    config = SpeculativeConfig(budget=3)
    given = (None, False, True, config, {"budget": 3})
    expected = [None, None, SpeculativeConfig(), config, config]
    assert [SpeculativeConfig.resolve(value) for value in given] == expected


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    config = SpeculativeConfig.resolve(name)
    assert config is not None
    assert set(config.drafters or DEFAULT_DRAFTERS) <= set(BUILT_IN_DRAFTERS)
    assert SpeculativeConfig.resolve_stored(name) == config


@pytest.mark.parametrize("name", [*BUILT_IN_DRAFTERS])
def test_a_drafter_alone_means_what_it_says(name: str) -> None:
    assert SpeculativeConfig(drafters=name).drafters == (name,)
    assert SpeculativeConfig.resolve(name).drafters == (name,)  # type: ignore[union-attr]
    assert SpeculativeConfig.resolve_stored({"drafters": name}).drafters == (name,)  # type: ignore[union-attr]
    assert SpeculativeConfig(drafters=OBJECT).drafters == (OBJECT,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("promt_lookup", "speculative cannot be 'promt_lookup'; known: default,"),
        ({"drafter": "ngram"}, "no argument 'drafter'; known: drafters, max_draft_nodes"),
    ],
)
def test_what_is_not_known(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.resolve(value)


@pytest.mark.parametrize("value", [SpeculativeConfig(), 1, 1.5, object(), ("ngram",)])
def test_a_generation_config_holds_json_values_only(value: Any) -> None:
    with pytest.raises(ValueError, match=r"config\.to_dict\(\)"):
        SpeculativeConfig.resolve_stored(value)

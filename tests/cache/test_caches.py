"""Caches by name and caches of the caller's: plain's text, and the object that plain leaves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import lookahead_hf
from lookahead_hf.fallback import FallbackReason
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted

Warned = lookahead_hf.SpeculationFallbackWarning
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


def test_turns_on_a_static_cache_of_the_callers() -> None:
    """Speculated and plain turns alternate on one object, whose tensors stay where they are."""
    model, rows = tiny("gemma3"), 3
    ids = prompt(rows, seed=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    caches = iter([StaticCache(config=model.config, max_cache_len=100) for _ in range(2)])
    used: list[StaticCache] = []

    def call() -> dict[str, Any]:
        used.append(next(caches))
        return {"input_ids": ids, "attention_mask": mask, CACHE: used[-1], **GREEDY}

    text = compared(model, call, 12).ours
    plain, ours = used
    assert_same_static(ours, plain)
    addresses = [layer.keys.data_ptr() for layer in ours.layers]
    for turn in range(2):
        ids = torch.cat([text, prompt(rows, 4, seed=3 + turn)], 1)
        mask = torch.cat([mask, mask.new_ones(rows, ids.shape[1] - mask.shape[1])], 1)
        caches = iter([plain, ours])
        if turn == 0:
            text = compared(model, call, ids.shape[1]).ours
            assert_same_static(ours, plain)
        else:
            assert model.generate(**call()).tolist() == model.generate(**call()).tolist()
    assert [layer.keys.data_ptr() for layer in ours.layers] == addresses


def assert_same_static(ours: Any, plain: Any) -> None:
    """Compare two static caches; the first row alone has no pads in any call of these tests."""
    first = torch.zeros(len(ours.layers[0].keys), 200)
    first[0] = 1
    assert type(ours) is StaticCache
    assert_same_cache(ours, plain, first)
    for a, b in zip(ours.layers, plain.layers, strict=True):
        assert int(a.cumulative_length) == int(b.cumulative_length) or a.is_sliding


@pytest.mark.parametrize(("rows", "num_new"), [(1, 1), (3, 6), (3, 40)])
def test_a_static_window_comes_back_whole(rows: int, num_new: int) -> None:
    model, ids = tiny("mistral"), prompt(rows)
    plain, ours = (StaticCache(config=model.config, max_cache_len=64) for _ in range(2))
    call = {"attention_mask": torch.ones_like(ids), **GREEDY, "max_new_tokens": num_new}
    text = model.generate(ids, **{CACHE: plain}, **call)
    config = scripted(continuations(text, 12), RandomTrees())
    with lookahead_hf.enabled(model):
        got = model.generate(ids, **{CACHE: ours}, **call, speculative=config)
    assert got.tolist() == text.tolist()
    assert_same_static(ours, plain)


def refused(model: Any, reason: FallbackReason, detail: str, **call: Any) -> None:
    with pytest.warns(Warned, match=rf"{detail}.*\[{reason}\]"), lookahead_hf.enabled(model):
        model.generate(prompt(), **GREEDY, **call, speculative=True)


class OwnCache(DynamicCache):
    """A subclass may do anything."""


def test_attentions_over_a_static_cache_are_left_to_plain() -> None:
    shown = {"return_dict_in_generate": True, "output_attentions": True}
    call = {"cache_implementation": "static", **shown}
    refused(tiny("llama", "eager"), FallbackReason.CACHE, "room", **call)


@pytest.mark.parametrize(
    ("name", "detail", "make", "error"),
    [
        # A sliding layer that was made for less than the window ends there.
        ("mistral", "20 columns", lambda c: StaticCache(config=c, max_cache_len=20), None),
        ("llama", "20 columns", lambda c: StaticCache(config=c, max_cache_len=20), IndexError),
        ("llama", "OwnCache", lambda c: OwnCache(config=c), None),
    ],
)
def test_caches_that_are_left_to_plain(name: str, detail: str, make: Any, error: Any) -> None:
    model = tiny(name, **({"sliding_window": 64} if name == "mistral" else {}))
    with pytest.raises(error) if error else nullcontext():
        refused(model, FallbackReason.CACHE, detail, **{CACHE: make(model.config)})


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", DynamicCache, StaticCache])
def test_an_offloaded_cache_is_left_to_plain(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", object)  # which there is none of without an accelerator
    model = lookahead_hf.enable(tiny("gemma3"))
    if isinstance(kind, str):
        call: dict[str, Any] = {"cache_implementation": kind}
        match = rf"cache_implementation='{kind}'"
    else:
        room = {"max_cache_len": 60} if kind is StaticCache else {}
        call = {CACHE: kind(config=model.config, offloading=True, **room)}
        match = "offloaded cache"
    with pytest.raises(lookahead_hf.SpeculationFallbackError, match=match):
        model.generate(prompt(), **GREEDY, **call, speculative={"on_fallback": "error"})

"""Caches by name and caches of the caller's: plain's text, and the object that plain leaves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import lookahead_hf
from lookahead_hf.fallback import FallbackReason
from tests.helpers.caches import CACHE
from tests.helpers.models import prompt, tiny

Warned = lookahead_hf.SpeculationFallbackWarning
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


def refused(model: Any, reason: FallbackReason, detail: str, **call: Any) -> None:
    with pytest.warns(Warned, match=rf"{detail}.*\[{reason}\]"), lookahead_hf.enabled(model):
        model.generate(prompt(), **GREEDY, **call, speculative=True)


class OwnCache(DynamicCache):
    """A subclass may do anything."""


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

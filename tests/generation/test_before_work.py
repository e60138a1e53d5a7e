"""Fallbacks are found before an encoder runs, or at least without a second run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import lookahead_hf
from lookahead_hf.call import admission
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.helpers.caches import CACHE
from tests.helpers.calls import padded
from tests.helpers.compared import reason_of
from tests.helpers.fakes import Recorder
from tests.helpers.models import prompt, tiny

Warned = lookahead_hf.SpeculationFallbackWarning
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0}


@contextmanager
def counted(module: Any) -> Iterator[list[int]]:
    """How often a module runs."""
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    handle = module.register_forward_pre_hook(count)
    try:
        yield runs
    finally:
        handle.remove()


def pair() -> tuple[Any, dict[str, Any], Any]:
    model = tiny("bart").double()
    return model, padded("right", 2), model.get_encoder()


class OwnCache(DynamicCache):
    """A class of somebody's may do anything."""


@pytest.mark.parametrize("on_fallback", ["warn", "error"])
@pytest.mark.parametrize("what", ["attention", "cache"])
def test_what_a_model_or_cache_says_is_read_first(what: str, on_fallback: str) -> None:
    model, inputs, encoder = pair()
    given: dict[str, Any] = {}
    if what == "cache":
        given[CACHE] = EncoderDecoderCache(OwnCache(), DynamicCache())
    else:
        model.config._attn_implementation_internal = "own_attention"
    call = {**inputs, **SETTINGS, **given, "speculative": {"on_fallback": on_fallback}}
    with lookahead_hf.enabled(model), counted(encoder) as runs:
        if on_fallback == "error":
            with pytest.raises(lookahead_hf.SpeculationFallbackError, match=rf"\[{what}\]"):
                model.generate(**call)
            assert runs == [0]
        elif what == "cache":
            with pytest.warns(Warned, match=rf"\[{what}\]"):
                model.generate(**call)
            assert runs == [1]


def refuses(*_: Any) -> None:
    raise Unserved(FallbackReason.CACHE, "found late")


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_what_is_found_late_goes_on_from_where_it_is(
    name: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name)
    inputs = padded("right", 1) if name == "bart" else {"input_ids": prompt()}
    call = {**inputs, **SETTINGS, "do_sample": do_sample, "return_dict_in_generate": True}
    streams = Recorder(), Recorder()
    torch.manual_seed(5)
    plain = model.generate(**call, streamer=streams[0])
    after = torch.get_rng_state()
    monkeypatch.setattr(admission, "_check_capacity", refuses)
    torch.manual_seed(5)
    encoder = model.get_encoder() if name == "bart" else model.model.embed_tokens
    lookahead_hf.enable(model)
    with counted(encoder) as runs, pytest.warns(Warned, match="found late") as caught:
        ours = model.generate(**call, streamer=streams[1], speculative=True)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(torch.get_rng_state(), after)
    assert streams[1].events == streams[0].events
    assert caught[0].filename == __file__
    assert runs == [1 if name == "bart" else SETTINGS["max_new_tokens"]]
    assert reason_of(model) == "cache"
    assert ours.speculative_stats is lookahead_hf.last_stats(model)


def test_with_an_assistant_plain_generate_drafts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plain does then is not its loop of single tokens."""
    model, assistant = tiny("llama"), tiny("llama", seed=1)
    call = {"input_ids": prompt(), **SETTINGS, "do_sample": False, "assistant_model": assistant}
    monkeypatch.setattr(admission, "_check_capacity", refuses)
    expected = model.generate(**call)
    lookahead_hf.enable(model)
    with counted(assistant) as runs, pytest.warns(Warned, match="found late"):
        assert torch.equal(model.generate(**call, speculative=True), expected)
    assert runs[0] > 0


@pytest.mark.parametrize("task", ["text-classification", "sentiment-analysis", "fill-mask"])
def test_a_pipeline_of_another_task_loads_nothing(task: str) -> None:
    """Not even a configuration: transformers would say that there is no such model."""
    with pytest.raises(ValueError, match=f"a {task} pipeline does not generate text"):
        lookahead_hf.pipeline(task, "owner/name")

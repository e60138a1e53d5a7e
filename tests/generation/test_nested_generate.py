"""Models with a `generate` of their own, which calls transformers' once, often or never."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import lookahead_hf
from tests.helpers.calls import run
from tests.helpers.fakes import PlainDecoding, Recorder
from tests.helpers.models import prompt, tiny

Warned = lookahead_hf.SpeculationFallbackWarning


@pytest.fixture
def model() -> Iterator[Any]:
    model = tiny("llama")
    yield lookahead_hf.enable(model)
    lookahead_hf.disable_everywhere()


def test_a_generate_that_passes_to_a_part_of_the_model(model: Any, decoding: PlainDecoding) -> None:
    class Outer(LlamaForCausalLM):
        def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
            return self.inner.generate(inputs, **kwargs)

    outer = Outer(model.config).eval()
    outer.inner = tiny("gpt2")
    expected = run(outer)
    lookahead_hf.enable(outer)
    assert torch.equal(run(outer, speculative=True), expected)
    assert decoding.calls[0].model is outer.inner
    assert lookahead_hf.last_stats(outer) is lookahead_hf.last_stats(outer.inner)


def test_a_generate_that_decodes_by_itself(model: Any, decoding: PlainDecoding) -> None:
    def alone(self: Any, *args: Any, custom_generate: Any = None, **kwargs: Any) -> Any:
        return type(self).generate(self, *args, **kwargs)

    lookahead_hf.disable(model)
    vars(model)["generate"] = MethodType(alone, model)
    plain, ours = Recorder(), Recorder()
    expected = run(model, streamer=plain)
    lookahead_hf.enable(model)
    with pytest.warns(Warned, match="own_generate") as caught:
        got = run(model, streamer=ours, speculative=True)
    assert caught[0].filename == __file__
    assert torch.equal(got, expected)
    assert ours.events == plain.events
    assert not decoding.calls
    assert "test_a_generate_that_decodes_by_itself.<locals>.alone" in str(caught[0].message)
    refuses: dict[str, Any] = {"speculative": {"on_fallback": "error"}}
    with pytest.raises(lookahead_hf.SpeculationFallbackError):
        run(model, **refuses)
    unheard = Recorder()
    with pytest.raises(lookahead_hf.SpeculationFallbackError):
        run(model, streamer=unheard, **refuses)
    assert unheard.events == []


def test_a_generate_that_takes_no_strategy(model: Any, decoding: PlainDecoding) -> None:
    def narrow(self: Any, inputs: Any, attention_mask: Any, max_new_tokens: int) -> Any:
        return inputs + max_new_tokens

    lookahead_hf.disable(model)
    vars(model)["generate"] = MethodType(narrow, model)
    lookahead_hf.enable(model)
    ids = prompt()
    with pytest.warns(Warned, match="own_generate"):
        got = model.generate(ids, ids, max_new_tokens=2, speculative=True)
    assert torch.equal(got, ids + 2)

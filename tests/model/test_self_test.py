"""A model of an unknown type is tested once, and the outcome is logged."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import lookahead_hf
from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.fallback import Unserved
from lookahead_hf.model import self_test
from tests.helpers.compared import compared, left_to_plain, served
from tests.helpers.models import left_padded, prompt, tiny
from tests.helpers.multimodal import build
from tests.helpers.users_parts import Changing


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of an unknown type, of whose kind none has passed."""
    monkeypatch.setattr(self_test, "TRIED", frozenset())
    monkeypatch.setattr(self_test, "passed", WeakKeyDictionary())
    return tiny("llama")


def test_one_sound_model_of_a_kind_is_tested_once(
    unknown: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lookahead_hf")
    assert self_test.refusal(unknown) == ("", "")
    assert "in its self test LlamaForCausalLM differed by" in caplog.text
    odd = tiny("llama")
    odd.model.layers[1].mlp.forward = lambda *_: 1 / 0
    assert "ZeroDivisionError" in self_test.refusal(odd)[0]
    monkeypatch.setattr(LlamaMLP, "forward", lambda *_: 1 / 0)  # no forward works any more
    for model in (unknown, tiny("llama")):
        assert self_test.refusal(model) == ("", "")
    for other in (tiny("llama", num_hidden_layers=1), tiny("llama").double()):
        assert "ZeroDivisionError" in self_test.refusal(other)[0]


def test_a_model_that_fails_is_tested_once_and_says_why(
    unknown: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    unknown.model.layers[1].mlp.forward = lambda *_: calls.append(1) or 1 / 0
    caplog.set_level(logging.INFO, "lookahead_hf")
    said = "a block of tokens fails in LlamaForCausalLM: ZeroDivisionError: division by zero"
    for _ in range(2):
        assert self_test.refusal(unknown)[0] == said
    assert "self test of LlamaForCausalLM failed" in caplog.text
    assert len(calls) == 1


def test_a_model_that_forgets_positions_is_not_served(unknown: Any) -> None:
    def shift(module: Any, args: Any, kwargs: Any) -> Any:
        positions = kwargs["position_ids"]
        return args, {**kwargs, "position_ids": torch.arange(positions.shape[-1])[None]}

    unknown.model.rotary_emb.register_forward_pre_hook(shift, with_kwargs=True)
    assert "gives other logits for blocks" in self_test.refusal(unknown)[0]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_for_all", [False, True])
def test_what_a_hook_caused_goes_with_it(unknown: Any, is_packed: bool, is_for_all: bool) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("not now")

    def register() -> Any:
        own = unknown.model.layers[1].register_forward_hook
        return (torch.nn.modules.module.register_module_forward_hook if is_for_all else own)(fail)

    with register():
        assert "ValueError: not now" in self_test.refusal(unknown, is_packed)[0]
    assert self_test.refusal(unknown, is_packed) == ("", "")


class Leaning(Changing):
    """Treats the last token of every forward in its own way."""

    def change(self, logits: torch.Tensor, steps: int) -> None:
        logits[:, -1] += torch.arange(logits.shape[-1]) % 7


class Preparing(LlamaForCausalLM):
    """Shifts the positions of every step behind the prompt."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if not kwargs.get("is_first_iteration"):
            inputs["position_ids"] = inputs["position_ids"] + 5
        return inputs


class Remembering(Changing):
    """Counts its steps, and leans its logits by that."""

    def change(self, logits: torch.Tensor, steps: int) -> None:
        logits += torch.arange(logits.shape[-1]) % (2 + steps)

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(*args, **kwargs)
        return {**updated, "steps": updated.get("steps", 0) + 1}


@pytest.mark.parametrize("kind", [Leaning, Preparing, Remembering])
def test_a_subclass_of_a_trusted_type_is_tested(kind: Any) -> None:
    model = kind(tiny("llama").config).eval()
    call = {"inputs": prompt(2), "max_new_tokens": 12, "do_sample": False}
    left_to_plain(model, lambda: dict(call), "other logits for blocks")


@pytest.mark.filterwarnings("ignore")
def test_a_model_around_one_of_a_trusted_type_is_tested() -> None:
    """PaliGemma makes the masks of layers with windows, and takes no others."""
    model = build("paligemma")
    model.config.text_config = tiny("gemma3").config
    wraps = type(model)(model.config).eval()
    call = {"input_ids": prompt(2), "max_new_tokens": 12, "do_sample": False}
    left_to_plain(wraps, lambda: dict(call), "a block of tokens fails in PaliGemma")


def appended(model: Any, layer: Any) -> None:
    """Let the decoder call a layer once more; it stays the layer of the cache that it is."""
    model.model.layers.append(layer)
    model.config.num_hidden_layers += 1


def looped(model: Any) -> None:
    """Let a layer run itself twice."""
    layer, own = model.model.layers[1], type(model.model.layers[1])

    class Twice(own):  # type: ignore[misc]
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            once = own.forward(self, hidden_states, *args, **kwargs)
            return own.forward(self, once, *args, **kwargs)

    layer.__class__ = Twice


def replaced(model: Any) -> None:
    """Let a layer have a forward of its own that runs it twice."""
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda x, *args, **kwargs: own(own(x, *args, **kwargs), *args, **kwargs)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: appended(model, model.model.layers[0]),
        lambda model: appended(model, copy.deepcopy(model.model.layers[1])),
        looped,
        replaced,
    ],
)
def test_a_layer_of_the_cache_that_is_written_twice_is_found(change: Any) -> None:
    model = tiny("llama")
    change(model)
    call = {"inputs": prompt(1), "max_new_tokens": 12, "do_sample": False}
    left_to_plain(model, lambda: dict(call), "a block of tokens fails")


def test_a_decoder_with_an_encoder_writes_each_layer_once_too() -> None:
    model = tiny("bart")
    model.model.decoder.layers.append(model.model.decoder.layers[0])
    with pytest.raises(Unserved, match="share a layer of the cache"):
        admission.admit(model, Purpose.WARM_UP)


class KeepsAll(LlamaForCausalLM):
    """Returns the logits of all tokens, whatever it is asked for."""

    @functools.wraps(LlamaForCausalLM.forward, assigned=())
    def forward(self, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_may_return_more_logits_than_it_is_asked_for() -> None:
    model = KeepsAll(tiny("llama").config).eval()
    call = {**left_padded((0, 5, 9)), "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    compared(model, lambda: dict(call), 12)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "no memory.*free some"),
        (MemoryError(), "no memory.*free some"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "no memory"),
        (OSError("the hub cannot be reached"), "failed: the hub cannot be reached.*call again"),
    ],
)
def test_what_the_system_could_not_do_is_tried_again(
    unknown: Any, error: Exception, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    handle = unknown.model.layers[1].register_forward_hook(fail)
    lookahead_hf.enable(unknown)
    call = {"max_new_tokens": 4, "do_sample": False, "speculative": {"on_fallback": "error"}}
    with pytest.raises(lookahead_hf.SpeculationFallbackError, match=said):
        unknown.generate(prompt(), **call)
    handle.remove()
    unknown.generate(prompt(), **call)
    served(unknown)

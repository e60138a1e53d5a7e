"""Calls that cannot be speculated write plain's text and warn once, with a reason of the list."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

import lookahead_hf
from lookahead_hf import fallback
from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.helpers.calls import run
from tests.helpers.compared import reason_of
from tests.helpers.fakes import PlainDecoding
from tests.helpers.models import prompt, tiny

Warned = lookahead_hf.SpeculationFallbackWarning


@pytest.fixture
def model() -> Any:
    return lookahead_hf.enable(tiny("llama"))


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("beams", {"num_beams": 2}),
        ("beams", {"num_beams": 2, "do_sample": True, "return_dict_in_generate": True}),
        ("no_cache", {"use_cache": False}),
    ],
)
def test_settings_that_are_not_served(
    model: Any, decoding: PlainDecoding, reason: str, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    expected = run(model, **settings)
    torch.manual_seed(0)
    with pytest.warns(Warned, match=rf"LlamaForCausalLM runs plain generate: .*\[{reason}\]"):
        got = run(model, **settings, speculative=True)
    assert reason_of(model) == reason
    if "return_dict_in_generate" in settings:
        assert got.speculative_stats is lookahead_hf.last_stats(model)
        assert got.keys() == expected.keys()
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected)
    assert not decoding.calls


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1, "use_cache": True, "token_healing": False, "guidance_scale": 1},
        {"cache_implementation": "dynamic"},
        {"penalty_alpha": 0.6, "do_sample": True},
    ],
)
def test_settings_that_are_served(
    model: Any, decoding: PlainDecoding, settings: dict[str, Any]
) -> None:
    run(model, **settings, speculative=True)
    assert len(decoding.calls) == 1


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("decoding_method", {"penalty_alpha": 0.6, "top_k": 4}),
        ("decoding_method", {"dola_layers": "low"}),
        ("decoding_method", {"constraints": [1]}),
        ("decoding_method", {"force_words_ids": [[1]]}),
        ("continuous_batching", {"cache_implementation": "paged"}),
        ("token_healing", {"token_healing": True}),
        ("cache_implementation", {"cache_implementation": "quantized"}),
        ("cache_implementation", {"cache_implementation": "offloaded"}),
    ],
)
def test_settings_whose_plain_call_needs_more(reason: str, settings: dict[str, Any]) -> None:
    with pytest.raises(Unserved, match=rf"\[{reason}\]"):
        fallback.check_settings({"use_cache": True, **settings}.get)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_active_dropout(name: str, decoding: PlainDecoding) -> None:
    model = lookahead_hf.enable(tiny(name)).train()
    if name == "llama":
        run(model, speculative=True)  # trainers generate in training mode, without dropout
        assert len(decoding.calls) == 1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    torch.manual_seed(0)
    expected = run(model)
    torch.manual_seed(0)
    with pytest.warns(Warned, match=r"dropout.*model\.eval\(\)"):
        assert torch.equal(run(model, speculative=True), expected)
    count = len(decoding.calls)
    run(model.eval(), speculative=True)
    assert len(decoding.calls) == count + 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_parts_are_served(model: Any, decoding: PlainDecoding) -> None:
    model.model.layers[0].mlp.act_fn = torch.jit.script(nn.SiLU())
    expected = run(model)
    assert torch.equal(run(model, speculative=True), expected)
    assert len(decoding.calls) == 1


def test_gradient_checkpointing(model: Any, decoding: PlainDecoding) -> None:
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
    run(model, speculative=True)
    assert len(decoding.calls) == 1
    model.train()
    with pytest.raises(Unserved, match="gradient checkpointing"):
        admission.admit(model, Purpose.CALL)


def test_encoder_decoder(decoding: PlainDecoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ENCODER_DECODERS", admission.ENCODER_DECODERS - {"bart"})
    model = lookahead_hf.enable(tiny("bart"))
    expected = run(model)
    with pytest.warns(Warned, match="encoder_decoder"):
        assert torch.equal(run(model, speculative=True), expected)
    assert not decoding.calls


def test_recurrent_state() -> None:
    config = RwkvConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(Unserved, match="stateful"):
        admission.admit(RwkvForCausalLM(config).eval(), Purpose.CALL)


def test_a_decoding_loop_of_its_own(decoding: PlainDecoding) -> None:
    class Loops(LlamaForCausalLM):
        def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return input_ids.flip(1)

    model = lookahead_hf.enable(Loops(tiny("llama").config))
    with pytest.warns(Warned, match=r"Loops\._sample.*own_loop"):
        assert torch.equal(run(model, speculative=True), prompt().flip(1))


def test_one_warning_per_model_and_reason(model: Any) -> None:
    other = lookahead_hf.enable(tiny("gpt2"))
    calls = [(model, {"num_beams": 2})] * 2 + [(model, {"use_cache": False})] * 2
    calls += [(other, {"num_beams": 2})] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each, settings in calls:
            run(each, **settings, speculative=True)
    ours = [warning for warning in caught if warning.category is Warned]
    assert [str(w.message).partition(" ")[0] for w in ours] == [
        "LlamaForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel",
    ]  # fmt: skip
    assert {warning.filename for warning in ours} == {run.__code__.co_filename}


def test_silent_and_error(model: Any) -> None:
    run(model, num_beams=2, speculative={"on_fallback": "silent"})
    assert reason_of(model) == "beams"
    with pytest.raises(lookahead_hf.SpeculationFallbackError, match=r"beams.*pass num_beams=1"):
        run(model, num_beams=2, speculative={"on_fallback": "error"})


def test_every_reason_has_a_text_and_a_remedy() -> None:
    for reason in FallbackReason:
        assert reason.text
        assert str(reason) == reason.value == reason == reason.name.lower()
        said = str(Unserved(reason, "detail"))
        assert said.startswith(reason.text) and f"[{reason}]" in said
        assert reason.fix and said.endswith(f". To speculate, {reason.fix}")

    own = str(Unserved(FallbackReason.BEAMS, fix="ask less"))
    assert own.endswith("To speculate, ask less") and "num_beams" not in own

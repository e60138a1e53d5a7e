"""PEFT's prompt and prefix tuning: virtual tokens before the prompt, and plain's text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from tests.helpers.caches import CACHE
from tests.helpers.calls import padded
from tests.helpers.compared import compared, speculated
from tests.helpers.encoder_decoder import GREEDY, SAMPLED, call
from tests.helpers.models import tiny
from tests.helpers.outputs import ALL, assert_close

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),
    pytest.mark.filterwarnings("ignore:`is_|Passing:UserWarning"),
]
CONFIGS = {
    "prefix": peft.PrefixTuningConfig,
    "prompt": peft.PromptTuningConfig,
    "p": peft.PromptEncoderConfig,
}


def tuned(model: Any, kind: str, task: str = "CAUSAL_LM") -> Any:
    """A model behind five virtual tokens that matter."""
    given = {"encoder_hidden_size": 16} if kind == "p" else {}
    wrapped = peft.get_peft_model(
        model, CONFIGS[kind](task_type=task, num_virtual_tokens=5, **given)
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_(std=1.0, generator=torch.Generator().manual_seed(1))
    return wrapped.eval()


def causal(rows: int, **settings: Any) -> dict[str, Any]:
    inputs = padded("left") if rows > 1 else {"input_ids": padded("left")["input_ids"][:1]}
    return {**inputs, "max_new_tokens": 30, "pad_token_id": 0, **settings}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_texts(name: str, kind: str, rows: int) -> None:
    if (name, kind) == ("gemma3", "prefix"):
        kind = "prompt"  # its heads are wider than PEFT takes them to be
    settings = SAMPLED if kind == "prefix" else GREEDY
    model = tuned(tiny(name), kind)
    stats = compared(model, lambda: causal(rows, **settings), 14).stats
    assert stats.num_moved > 0


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_what_is_returned(kind: str) -> None:
    model = tuned(tiny("llama", "eager"), kind)
    both = compared(model, lambda: causal(1, **SAMPLED, **ALL, eos_token_id=[5, 6]), 14)
    for name in ("scores", "hidden_states", "attentions"):
        assert_close(both.ours[name], both.plain[name])
    layers = zip(both.ours[CACHE].layers, both.plain[CACHE].layers, strict=True)
    for ours, plain in layers:
        assert_close([ours.keys, ours.values], [plain.keys, plain.values])


def test_without_a_hook() -> None:
    model = tuned(tiny("llama"), "prefix")
    expected = model.generate(**causal(3, **GREEDY))
    got = lookahead_hf.generate(model, **causal(3, **GREEDY), speculative={"budget": 8})
    assert got.tolist() == expected.tolist()
    speculated(model)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("name", "kind"), [("t5", "prefix"), ("t5", "prompt"), ("bart", "prompt")])
def test_encoder_decoder_models(name: str, kind: str, rows: int) -> None:
    compared(tuned(tiny(name), kind, "SEQ_2_SEQ_LM"), lambda: call(rows, **SAMPLED), 1)


def refused(model: Any, why: str, **settings: Any) -> None:
    expected = model.generate(**causal(3, **GREEDY, **settings))
    lookahead_hf.enable(model)
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=rf"{why}.*\[adapter\]"):
        got = model.generate(**causal(3, **GREEDY, **settings), speculative=True)
    assert got.tolist() == expected.tolist()


def test_a_model_that_counts_what_its_mask_shows_is_left_to_plain() -> None:
    refused(tuned(tiny("opt"), "prompt"), "leave pads out")


def test_what_another_wrapper_prepares_is_left_to_plain() -> None:
    model = tiny("llama")
    model.prepare_inputs_for_generation = Prepares(model).prepare_inputs_for_generation
    refused(model, "Prepares prepares its inputs")


class Prepares:
    """Something that is not known."""

    def __init__(self, model: Any) -> None:
        self._prepare = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepare(*args, **kwargs)

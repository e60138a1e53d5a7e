"""Stop strings and refusals: what is handed over comes out as plain has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import lookahead_hf
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.helpers.calls import run
from tests.helpers.fakes import PlainDecoding, Recorder
from tests.helpers.models import characters, tiny

Warned = lookahead_hf.SpeculationFallbackWarning


@pytest.fixture
def model() -> Any:
    return lookahead_hf.enable(tiny("llama"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return characters()


def stop_word(model: Any) -> str:
    """The text's fourth character, with which a stop string ends it early."""
    return chr(33 + int(run(model, speculative=False)[0, -5]))


@pytest.mark.parametrize("place", ["call", "passed config", "model config", "both configs"])
def test_stop_strings(
    model: Any, decoding: PlainDecoding, tokenizer: Any, place: str, caplog: Any
) -> None:
    word = stop_word(model)
    config = GenerationConfig(max_new_tokens=8)
    given: dict[str, Any] = {"tokenizer": tokenizer}
    if place == "call":
        given["stop_strings"] = word
    if place in ("passed config", "both configs"):
        config.stop_strings = [word]
    if place in ("model config", "both configs"):
        model.generation_config.stop_strings = [word]
    if place != "call":
        given["generation_config"] = config
    expected = run(model, **given)
    assert expected.shape[1] < 12 + 8
    got = run(model, **given, speculative=True)
    assert torch.equal(got, expected)
    (call,) = decoding.calls
    assert [type(each) for each in call.criteria] == [
        MaxLengthCriteria,
        StopStringCriteria,
    ]
    assert config.stop_strings == (
        [word] if "config" in place and place != "model config" else None
    )


def test_stop_strings_beside_criteria_of_the_callers(
    model: Any, decoding: PlainDecoding, tokenizer: Any
) -> None:
    class Mine(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(len(input_ids), dtype=torch.bool)

    word = stop_word(model)
    given = {"tokenizer": tokenizer, "stop_strings": word}
    own = StopStringCriteria(tokenizer, [word])
    mine = Mine()
    criteria = StoppingCriteriaList([mine])
    run(model, **given, stopping_criteria=criteria, speculative=True)
    assert list(criteria) == [mine]
    assert [type(c) for c in decoding.calls[0].criteria][1:] == [Mine, StopStringCriteria]
    run(model, **given, stopping_criteria=[own], speculative=True)
    found = [c for c in decoding.calls[1].criteria if isinstance(c, StopStringCriteria)]
    assert found == [own]


def test_stop_strings_without_tokenizer_raise_plains_error(
    model: Any, decoding: PlainDecoding
) -> None:
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        run(model, stop_strings="a", speculative=True)
    assert not decoding.calls


def refuse(call: Any) -> None:
    raise Unserved(FallbackReason.ARGUMENT, "Mine")


def test_what_decoding_refuses_runs_plainly_with_the_original_arguments(
    model: Any, decoding: PlainDecoding, tokenizer: Any
) -> None:
    word = stop_word(model)
    plain, ours = Recorder(), Recorder()
    given = {"stop_strings": word, "tokenizer": tokenizer, "return_dict_in_generate": True}
    expected = run(model, **given, streamer=plain)
    decoding.before = refuse
    with pytest.warns(Warned, match=r"\(Mine\) \[argument\]"):
        got = run(model, **given, streamer=ours, speculative=True, prediction=[1])
    assert torch.equal(got.sequences, expected.sequences)
    assert ours.events == plain.events
    assert got.speculative_stats is lookahead_hf.last_stats(model)
    assert got.speculative_stats.fallback_reason == "argument"
    assert len(decoding.calls) == 1


def test_what_plain_raises_after_a_refusal_is_all_that_is_seen(
    model: Any, decoding: PlainDecoding
) -> None:
    class Streamer(Recorder):
        def put(self, value: torch.Tensor) -> None:
            raise KeyError

    decoding.before = refuse
    with pytest.raises(KeyError) as raised, pytest.warns(Warned):
        run(model, streamer=Streamer(), speculative=True)
    assert raised.value.__context__ is None


def test_an_assistant_is_handed_over_to_decoding(model: Any, decoding: PlainDecoding) -> None:
    expected = run(model)
    assistant = lookahead_hf.enable(tiny("llama"))
    got = run(model, assistant_model=assistant, speculative=True)
    assert torch.equal(got, expected)
    assert [call.request.assistant_model for call in decoding.calls] == [assistant]

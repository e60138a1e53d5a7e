"""One call of `generate`: who decides, what reaches decoding, and what plain `generate` does."""

from __future__ import annotations

import copy
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
from tests.helpers.models import characters, prompt, tiny

Warned = lookahead_hf.SpeculationFallbackWarning


@pytest.fixture
def model() -> Any:
    return lookahead_hf.enable(tiny("llama"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return characters()


class Spy:
    """A `generate` that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "output"


@pytest.mark.parametrize("given", [{}, {"speculative": None}, {"speculative": False}])
def test_plain_calls_get_exactly_what_was_given(model: Any, given: dict[str, Any]) -> None:
    lookahead_hf.disable(model)
    vars(model)["generate"] = spy = Spy()
    lookahead_hf.enable(model)
    ids, config, criteria, streamer = prompt(), GenerationConfig(), [object()], object()
    args = (ids, config, None, criteria)
    kwargs = {"streamer": streamer, "temperature": 0.5, "custom_generate": "owner/repository"}
    assert model.generate(*args, **kwargs, **given) == "output"
    (seen_args, seen_kwargs), *others = spy.calls
    assert not others
    assert [id(each) for each in seen_args] == [id(each) for each in args]
    assert seen_kwargs == kwargs
    assert seen_kwargs["streamer"] is streamer


def test_a_call_that_cannot_be_bound_raises_pythons_own_error(model: Any) -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        model.generate(prompt(), inputs=prompt(), speculative=True)


@pytest.mark.parametrize(
    ("call", "passed", "default", "expected"),
    [
        (True, False, False, True),
        (False, True, True, False),
        (None, True, False, True),
        (None, False, True, False),
        (None, None, True, True),
        (None, None, False, False),
        (None, None, None, False),
    ],
)
@pytest.mark.parametrize("positional", [False, True])
def test_who_decides(
    model: Any,
    decoding: PlainDecoding,
    call: Any,
    passed: Any,
    default: Any,
    expected: bool,
    positional: bool,
) -> None:
    lookahead_hf.set_default(model, default)
    config = GenerationConfig(max_new_tokens=4, speculative=passed)
    if positional:
        model.generate(prompt(), config, speculative=call)
    else:
        model.generate(prompt(), generation_config=config, speculative=call)
    assert bool(decoding.calls) is expected


@pytest.mark.parametrize("value", ["fast", 1, 0.5, {"drafter": "ngram"}, object()])
def test_what_is_not_understood_raises(model: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="(?i)speculative"):
        run(model, speculative=value)


def test_an_object_in_a_generation_config_raises(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=4)
    config.speculative = lookahead_hf.SpeculativeConfig()
    with pytest.raises(ValueError, match=r"config\.to_dict\(\)"):
        model.generate(prompt(), config)
    model.generation_config.speculative = lookahead_hf.SpeculativeConfig()
    with pytest.raises(ValueError, match=r"config\.to_dict\(\)"):
        run(model)
    run(model, speculative=False)


def test_a_default_does_not_stop_a_model_without_the_hook(model: Any) -> None:
    expected = run(model)
    lookahead_hf.set_default(model, {"drafters": ["ngram"]})
    other = tiny("llama")
    other.generation_config = copy.deepcopy(model.generation_config)
    assert torch.equal(run(other), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"custom_generate": lambda *args, **kwargs: None},
        {"custom_generate": "owner/repository"},
    ],
)
def test_two_strategies_conflict(
    model: Any, decoding: PlainDecoding, settings: dict[str, Any]
) -> None:
    name = next(iter(settings))
    with pytest.raises(ValueError, match=rf"speculative='default' and {name}="):
        run(model, speculative="default", **settings)
    if name != "custom_generate":
        with pytest.raises(ValueError, match=name):
            config = GenerationConfig(max_new_tokens=4, **settings)
            run(model, generation_config=config, speculative=True)
        setattr(model.generation_config, name, settings[name])
        with pytest.raises(ValueError, match=name):
            run(model, speculative=True)
    assert not decoding.calls


def test_settings_that_are_off_do_not_conflict(model: Any, decoding: PlainDecoding) -> None:
    run(model, speculative=True, prompt_lookup_num_tokens=None, use_mtp=False, custom_generate=None)
    assert len(decoding.calls) == 1


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
    assert [type(each) for each in call.criteria] == [MaxLengthCriteria, StopStringCriteria]
    assert config.stop_strings == ([word] if place in ("passed config", "both configs") else None)


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

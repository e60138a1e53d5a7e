"""One call of `generate`: who decides, what is handed over, what stays plain's own business."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import lookahead_hf
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.fakes import PlainDecoding, Recorder
from tests.models import characters, prompt, tiny

Warned = lookahead_hf.SpeculationFallbackWarning


@pytest.fixture
def model() -> Iterator[Any]:
    model = tiny("llama")
    yield lookahead_hf.enable(model)
    lookahead_hf.disable_everywhere()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return characters()


def run(model: Any, rows: int = 1, **kwargs: Any) -> Any:
    ids = prompt(rows)
    settings = {"max_new_tokens": 8, "do_sample": False, **kwargs}
    if "generation_config" in settings:
        settings = kwargs
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


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


@pytest.mark.parametrize(
    ("value", "drafters"),
    [
        ("prompt_lookup", ("ngram",)),
        ({"drafters": ["recycling"]}, ("recycling",)),
        (lookahead_hf.SpeculativeConfig(drafters=("ngram", "recycling")), ("ngram", "recycling")),
    ],
)
def test_the_configuration_arrives(
    model: Any, decoding: PlainDecoding, value: Any, drafters: tuple[str, ...]
) -> None:
    run(model, speculative=value)
    assert decoding.calls[0].request.config.drafters == drafters


@pytest.mark.parametrize("value", ["fast", 1, 0.5, {"drafter": "ngram"}, object()])
def test_what_is_not_understood_raises(model: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="speculative"):
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
        {"use_mtp": True},
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


def test_what_was_captured_arrives(model: Any, decoding: PlainDecoding, tokenizer: Any) -> None:
    streamer = Recorder()
    ids = prompt()
    model.generate(
        ids, None, None, None, None, True, None, streamer,
        max_new_tokens=3, tokenizer=tokenizer, speculative=True, prediction=[5, 6],
    )  # fmt: skip
    request = decoding.calls[0].request
    assert request.streamer is streamer
    assert request.tokenizer is tokenizer
    assert request.synced_gpus is True
    assert [row.tolist() for row in request.prediction] == [[5, 6]]
    run(model, speculative=True)
    assert decoding.calls[1].request.synced_gpus is False
    assert decoding.calls[1].request.streamer is None


@pytest.mark.parametrize("rows", [1, 2])
def test_a_streamer_gets_what_plain_gives_it(
    model: Any, decoding: PlainDecoding, rows: int
) -> None:
    plain, ours = Recorder(), Recorder()
    run(model, rows, streamer=plain)
    run(model, rows, streamer=ours, speculative=True)
    assert ours.events == plain.events
    assert len(decoding.calls) == 1


def test_a_streamers_exception_comes_out(model: Any, decoding: PlainDecoding) -> None:
    class Cancelled(Exception):
        pass

    class Streamer(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.events) == 3:
                raise Cancelled

    with pytest.raises(Cancelled):
        run(model, streamer=Streamer(), speculative=True)
    run(model, speculative=True)
    assert len(decoding.calls) == 2


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
    assert [type(each) for each in call.stopping_criteria] == [
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
    assert [type(c) for c in decoding.calls[0].stopping_criteria][1:] == [Mine, StopStringCriteria]
    run(model, **given, stopping_criteria=[own], speculative=True)
    found = [c for c in decoding.calls[1].stopping_criteria if isinstance(c, StopStringCriteria)]
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


def test_sampling_after_a_refusal_is_plains(model: Any, decoding: PlainDecoding) -> None:
    torch.manual_seed(1)
    expected = run(model, do_sample=True)
    decoding.before = refuse
    torch.manual_seed(1)
    with pytest.warns(Warned):
        assert torch.equal(run(model, do_sample=True, speculative=True), expected)


def test_an_assistant_decodes_plain_assisted(model: Any, decoding: PlainDecoding) -> None:
    expected = run(model)
    assistant = lookahead_hf.enable(tiny("llama"))
    lookahead_hf.set_default(assistant, True)
    with pytest.warns(Warned, match="assistant"):
        got = run(model, assistant_model=assistant, speculative=True)
    assert torch.equal(got, expected)
    assert not decoding.calls


def test_a_processor_may_ask_for_speculation_of_its_own(
    model: Any, decoding: PlainDecoding
) -> None:
    helper = lookahead_hf.enable(tiny("gpt2"))

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            helper.generate(input_ids, max_new_tokens=1, speculative=True)
            return scores

    run(model, logits_processor=[Asks()], speculative=False, max_new_tokens=2)
    assert [call.model for call in decoding.calls] == [helper, helper]


class Segments(LlamaForCausalLM):
    """A model whose `generate` calls `generate`, as Whisper's does for every segment."""

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        for _ in range(2):
            inputs = super().generate(inputs, generation_config, **kwargs)
            kwargs.pop("attention_mask", None)
        return inputs


@pytest.fixture
def segments(model: Any) -> Any:
    nested = Segments(model.config).eval()
    nested.load_state_dict(model.state_dict())
    nested.generation_config = copy.deepcopy(model.generation_config)
    return nested


def test_a_generate_that_calls_generate(segments: Any, decoding: PlainDecoding) -> None:
    expected = run(segments)
    lookahead_hf.enable_everywhere()
    lookahead_hf.enable(segments)
    assert torch.equal(run(segments, speculative=True), expected)
    assert len(decoding.calls) == 2
    lookahead_hf.set_default(segments, True)
    assert torch.equal(run(segments, speculative=False), expected)
    assert len(decoding.calls) == 2
    stats = lookahead_hf.last_stats(segments)
    assert stats is None


def test_a_streamer_through_a_generate_that_calls_generate(
    segments: Any, decoding: PlainDecoding
) -> None:
    plain, ours = Recorder(), Recorder()
    run(segments, streamer=plain)
    lookahead_hf.enable(segments)
    run(segments, streamer=ours, speculative=True)
    assert ours.events == plain.events
    assert len(decoding.calls) == 2


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
    with pytest.raises(lookahead_hf.SpeculationFallbackError):
        run(model, speculative={"on_fallback": "error"})


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


def test_stats_of_the_latest_call(model: Any, decoding: PlainDecoding) -> None:
    assert lookahead_hf.last_stats(model) is None
    run(model, speculative=True)
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.rows == 1
    run(model)
    assert lookahead_hf.last_stats(model) is None


def test_a_prediction_without_speculation(model: Any, decoding: PlainDecoding) -> None:
    expected = run(model)
    with pytest.raises(ValueError, match="prediction"):
        run(model, prediction=[1, 2])
    assert torch.equal(run(model, prediction=[1, 2], speculative=False), expected)
    with pytest.raises(ValueError, match="prediction holds"):
        run(model, prediction=[0.5], speculative=True)
    assert not decoding.calls


def test_nothing_of_a_call_stays(model: Any, decoding: PlainDecoding) -> None:
    before = dict(vars(model))
    config = copy.deepcopy(model.generation_config)
    run(model, speculative=True, streamer=Recorder(), prediction=[3])
    assert vars(model) == before
    assert model.generation_config == config


def test_prepared_arguments_are_plains(
    model: Any, decoding: PlainDecoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    stock = LlamaForCausalLM._sample

    @functools.wraps(stock)
    def sample(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        seen.append(dict(kwargs))
        return stock(self, input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "_sample", sample, raising=False)
    run(model)
    run(model, speculative=True)
    plain, ours = seen
    assert {*ours, "synced_gpus"} == {*plain, "streamer"}
    for name in ("position_ids", "attention_mask", "logits_to_keep", "use_cache"):
        assert str(ours[name]) == str(plain[name])

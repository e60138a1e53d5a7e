"""One call of `generate`: who decides, what reaches decoding, what stays plain's business."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import lookahead_hf
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

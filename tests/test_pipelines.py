"""Pipelines with speculation on by default, and calls that decide otherwise."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import transformers
from transformers import LlamaForSequenceClassification

import lookahead_hf
from tests.helpers.fakes import PlainDecoding
from tests.helpers.models import characters, tiny

SETTINGS = {"max_new_tokens": 6, "do_sample": False}


def writes(model: Any, pipeline: Any = lookahead_hf.pipeline, **ours: Any) -> Any:
    tokenizer = characters(pad_token="!")
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **ours)


@pytest.fixture
def text(model: Any) -> Any:
    return writes(model)


def test_text_generation(text: Any, decoding: PlainDecoding) -> None:
    plain = writes(tiny("llama"), transformers.pipeline)
    expected = plain("abcdef", **SETTINGS)
    assert text("abcdef", **SETTINGS) == expected
    assert len(decoding.calls) == 1
    assert text("abcdef", **SETTINGS, speculative=False) == expected
    assert len(decoding.calls) == 1
    text("abcdef", **SETTINGS, speculative="prompt_lookup")
    assert decoding.calls[1].request.config.drafters == ("ngram",)
    config = transformers.GenerationConfig(max_new_tokens=4)
    text("abcdef", generation_config=config)
    assert len(decoding.calls) == 3
    assert type(text) is type(plain)


def test_the_tokenizer_comes_along(text: Any, decoding: PlainDecoding) -> None:
    seen: list[dict[str, Any]] = []
    text.model.register_forward_pre_hook(lambda *call: seen.append(call[2]), with_kwargs=True)
    text("abcdef", **SETTINGS, prediction="xyz")
    request = decoding.calls[0].request
    assert request.tokenizer is text.tokenizer
    assert [ids.tolist() for ids in request.prediction] == [text.tokenizer("xyz")["input_ids"]]
    other = characters()
    text("abcdef", **SETTINGS, tokenizer=other)
    assert decoding.calls[1].request.tokenizer is other
    seen.clear()
    text("abcdef", **SETTINGS, speculative=False)
    assert seen and not any("token" in name for call in seen for name in call)


def test_a_callers_model_keeps_its_own_default(
    model: Any, text: Any, decoding: PlainDecoding
) -> None:
    ids = characters()("abcdef", return_tensors="pt")["input_ids"]
    model.generate(ids, **SETTINGS)
    assert not decoding.calls
    assert not hasattr(model.generation_config, "speculative")
    lookahead_hf.set_default(model, False)
    text("abcdef", **SETTINGS)
    assert len(decoding.calls) == 1


def test_what_does_not_generate_is_refused(model: Any) -> None:
    classifier = LlamaForSequenceClassification(model.config)
    with pytest.raises(ValueError, match="supports the tasks text-generation, image-text-to-text"):
        lookahead_hf.pipeline("text-classification", classifier, tokenizer=characters())
    assert "generate" not in vars(model)
    with pytest.raises(ValueError, match="speculative cannot be 'fast'"):
        lookahead_hf.pipeline("text-generation", model, speculative="fast")


@pytest.mark.parametrize("task", ["image-text-to-text", "any-to-any"])
def test_pipelines_that_read_pictures(
    task: str, llava: tuple[Any, Any], decoding: PlainDecoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    # any-to-any asks for torchvision, which a picture in memory does not need.
    monkeypatch.setattr("transformers.pipelines.any_to_any.requires_backends", lambda *args: None)
    model, processor = llava
    picture = Image.new("RGB", (16, 16), (255, 0, 0))
    pipe = lookahead_hf.pipeline(task, model=model, processor=processor, device="cpu")
    given = {"text": "#abc", "images": picture}
    expected = pipe(**given, max_new_tokens=5, speculative=False)
    assert not decoding.calls
    assert pipe(**given, max_new_tokens=5) == expected
    assert len(decoding.calls) == 1
    assert pipe(**given, generate_kwargs={"max_new_tokens": 5}) == expected
    assert len(decoding.calls) == 2
    pipe(**given, generate_kwargs={"max_new_tokens": 5, "speculative": False})
    assert len(decoding.calls) == 2
    pipe(**given, generate_kwargs={"max_new_tokens": 5}, speculative="prompt_lookup")
    assert decoding.calls[2].request.config.drafters == ("ngram",)
    assert all(call.request.tokenizer is processor.tokenizer for call in decoding.calls)
    assert type(pipe).__qualname__ == type(pipe).__name__  # can be pickled
    assert pickle.loads(pickle.dumps(type(pipe))) is type(pipe)

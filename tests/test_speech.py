"""Speech: Whisper, whose own `generate` goes from segment to segment, Moonshine, and pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.utils import ModelOutput

import lookahead_hf
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.helpers import speech
from tests.helpers.caches import CACHE
from tests.helpers.compared import assert_close, compared, speculated
from tests.helpers.fakes import Recorder
from tests.helpers.models import VOCAB, characters, tiny

DRAFTS = {"budget": 8, "drafters": ["ngram"]}
CONFIG = lookahead_hf.SpeculativeConfig(budget=8, drafters=("ngram",))
LONG = 3 * speech.FRAMES + 10
TURNS: dict[str, Any] = {"return_timestamps": True, "max_new_tokens": 24}


def long(rows: int) -> dict[str, Any]:
    """Sound of several segments; the second row's is shorter."""
    heard = torch.ones(rows, LONG, dtype=torch.long)
    heard[1:, 2 * speech.FRAMES + 5 :] = 0
    return {"input_features": speech.frames(rows, LONG), "attention_mask": heard, **TURNS}


def same(model: Any, **call: Any) -> lookahead_hf.SpeculativeStats:
    """Run a call both ways, assert that all it returned is equal, and that it was speculated."""
    plain, ours, stats = compared(model, lambda: call, 0, config=CONFIG)
    assert type(ours) is type(plain)
    if isinstance(plain, dict):
        for key in plain.keys() - {"segments", CACHE}:
            assert_close(ours[key], plain[key])
    if isinstance(ours, ModelOutput):
        assert ours.speculative_stats == stats
    return stats


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 1),
        ({"do_sample": True, "temperature": 0.6, "num_return_sequences": 2}, 1),
        ({"return_timestamps": True}, 3),
        ({"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}, 3),
    ],
)
def test_one_segment(settings: dict[str, Any], rows: int) -> None:
    same(speech.tiny_whisper(), input_features=speech.frames(rows), max_new_tokens=50, **settings)


@pytest.mark.parametrize("rows", [1, 2])
def test_all_segments_add_up_to_one_record(rows: int) -> None:
    model = speech.tiny_whisper()
    stats = same(model, **long(rows))
    assert stats.rows > rows
    assert stats.rows == len(stats.row_stats)
    assert stats.num_emitted == sum(row.num_emitted for row in stats.row_stats)
    assert sum(stats.accepted_histogram) == stats.row_steps
    assert sum(stats.budget_histogram.values()) == stats.num_steps
    assert stats.per_source["ngram"].accepted == stats.num_accepted


def test_a_segment_is_tried_again_at_higher_temperatures() -> None:
    thresholds = {"compression_ratio_threshold": 0.9, "logprob_threshold": -1.0}
    tried = same(speech.tiny_whisper(), **long(2), temperature=(0.0, 0.4, 0.8), **thresholds)
    assert tried.rows > same(speech.tiny_whisper(), **long(2)).rows


@pytest.mark.parametrize("rows", [1, 2])
def test_what_was_said_before_is_a_padded_prompt(rows: int) -> None:
    same(speech.tiny_whisper(), **long(rows), condition_on_prev_tokens=True)


@pytest.mark.parametrize("on_fallback", ["warn", "error"])
def test_a_later_segment_that_cannot_be_speculated(
    monkeypatch: pytest.MonkeyPatch, on_fallback: str
) -> None:
    from lookahead_hf.generation import strategy

    decode, calls = strategy.decode, []

    def refuses_the_second(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise Unserved(FallbackReason.ARGUMENT, "as a test has it")
        return decode(*args)

    monkeypatch.setattr(strategy, "decode", refuses_the_second)
    model, (plain, ours) = speech.tiny_whisper(), (Recorder(), Recorder())
    call = {**long(1), "temperature": 0.7}
    torch.manual_seed(3)
    expected = model.generate(**call, streamer=plain)
    torch.manual_seed(3)
    speculative = {**DRAFTS, "on_fallback": on_fallback}
    with lookahead_hf.enabled(model):
        if on_fallback == "error":
            with pytest.raises(lookahead_hf.SpeculationFallbackError, match="as a test has it"):
                model.generate(**call, speculative=speculative)
            return
        with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match="as a test has it"):
            got = model.generate(**call, speculative=speculative, streamer=ours)
    assert len(calls) > 2
    assert got.tolist() == expected.tolist()
    assert ours.events == plain.events


def test_an_assistant_hears_every_segment() -> None:
    model, call = speech.tiny_whisper(), long(2)
    expected = model.generate(**call)
    with lookahead_hf.enabled(model):
        got = model.generate(**call, assistant_model=speech.tiny_whisper(), speculative=DRAFTS)
    assert got.tolist() == expected.tolist()
    stats = speculated(model)
    # It is the model itself, but what must not be written it may draft.
    assert stats.per_source["assistant"].accepted > 0.5 * stats.num_accepted


def test_a_decoder_that_is_told_rotary_positions() -> None:
    model = tiny("moonshine", vocab_size=VOCAB)
    heard = torch.randn(3, 4_000, generator=torch.Generator().manual_seed(1))
    call = {"input_values": heard, "max_new_tokens": 40, "attention_mask": torch.ones(3, 4_000)}
    same(model, **call, do_sample=True, top_k=8, eos_token_id=[3, 4, 5])


def pipes(which: str) -> tuple[Any, Any]:
    """Return transformers' pipeline and the library's, on one model."""
    if which == "whisper":
        parts = {"model": speech.tiny_whisper(), "tokenizer": speech.whisper_tokenizer()}
        parts["feature_extractor"] = speech.whisper_features()
    else:
        tokenizer = characters(pad_token="!")
        parts = {"model": tiny("moonshine", vocab_size=len(tokenizer)), "tokenizer": tokenizer}
        parts["feature_extractor"] = transformers.Wav2Vec2FeatureExtractor()
    task = "automatic-speech-recognition"
    plain = transformers.pipeline(task, device="cpu", **parts)
    return plain, lookahead_hf.pipeline(task, device="cpu", speculative=DRAFTS, **parts)


@pytest.mark.parametrize(("which", "times"), [("whisper", None), ("moonshine", None)])
def test_a_pipeline_without_beams(which: str, times: str | None) -> None:
    plain, ours = pipes(which)
    call = {"generate_kwargs": {"num_beams": 1, "max_new_tokens": 40}, "return_timestamps": times}
    heard = speech.wave(0.5 if times is None else 5.0)  # Whisper hears two seconds at once
    expected = plain(heard, **call)
    assert len(set(expected["text"])) > 3
    assert ours(heard, **call) == expected
    speculated(ours.model)
    assert ours(heard, **call, speculative=False) == expected
    assert lookahead_hf.last_stats(ours.model) is None


def test_a_pipeline_asks_for_beams_by_default() -> None:
    plain, ours = pipes("moonshine")
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match="pass num_beams=1"):
        got = ours(speech.wave(), generate_kwargs={"max_new_tokens": 8})
    assert got == plain(speech.wave(), generate_kwargs={"max_new_tokens": 8})

"""Requests that plain `generate` writes, since they cannot be decoded together with others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead_hf
from tests.helpers import models, requests
from tests.helpers.requests import WAIT, alone, prompts, results, running, settings, speculated

pytestmark = pytest.mark.filterwarnings("ignore:.*runs plain generate")


class Waits(LogitsProcessor):
    """Says that a text has a token, and waits there until the next one may be chosen."""

    def __init__(self) -> None:
        self.begun, self.goes_on, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.begun.set()
        assert self.goes_on.wait(WAIT)
        return scores

    def write(self, manager: Any, text: list[int]) -> None:
        """Add a request, and return when its text has a token."""
        given = {"logits_processor": LogitsProcessorList([self]), **LONG}
        manager.add_request(text, request_id="alone", **given)
        assert self.begun.wait(WAIT)


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose frequencies change with the length of a text, from 48 tokens on."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    changing = models.tiny("llama", max_position_embeddings=48, rope_parameters=rope)
    return lookahead_hf.enable(changing, default=requests.DRAFTED)


LONG = {"max_new_tokens": 60}  # Such texts may need other frequencies in the end


def test_what_generate_would_return_does_not_matter(model: Any) -> None:
    config, (text, other) = settings(model, return_dict_in_generate=True), prompts(2, longest=9)
    with running(model, config) as manager:
        manager.add_request(text, request_id="alone", **LONG)
        manager.add_request(other, request_id="row")
        found = results(manager, 2)
    assert found["alone"].generated_tokens == alone(model, text, settings(model, **LONG))
    assert found["alone"].speculative_stats.fallback_reason == "model"
    assert found["row"].generated_tokens == alone(model, other, settings(model))
    speculated([found["row"]])


def test_a_cancelled_text_ends_and_other_requests_go_on(model: Any) -> None:
    config, texts, waits = settings(model), prompts(3, longest=9), Waits()
    with running(model, config, max_slots=3) as manager:
        waits.write(manager, texts[0])
        manager.add_request(texts[1], request_id="kept")
        manager.cancel_request("alone")
        waits.goes_on.set()
        found = results(manager, 1)
        manager.stop()
    assert manager.get_result(timeout=0) is None
    assert waits.calls == 1
    assert found["kept"].generated_tokens == alone(model, texts[1], config)
    speculated(found.values())


def test_it_may_be_written_beside_the_others(model: Any) -> None:
    texts, waits = prompts(2, longest=9), Waits()
    with running(model, settings(model), max_slots=1) as manager, ThreadPoolExecutor(1) as thread:
        manager.engine.beside = thread.submit
        waits.write(manager, texts[0])
        manager.add_request(texts[1], request_id="row")
        found = results(manager, 1)
        waits.goes_on.set()
        found |= results(manager, 1)
    assert found["alone"].generated_tokens == alone(model, texts[0], settings(model, **LONG))
    assert found["row"].generated_tokens == alone(model, texts[1], settings(model))
    speculated([found["row"]])


def test_a_hard_stop_ends_the_text(model: Any) -> None:
    config, texts, waits = settings(model), prompts(2, longest=9), Waits()
    with running(model, config) as manager:
        waits.write(manager, texts[0])
        manager.add_request(texts[1], request_id="waiting")
        manager.stop(block=False, hard_stop=True)
        waits.goes_on.set()
        found = results(manager, 2)
    assert waits.calls == 1
    assert all("stopped before" in output.error for output in found.values())


def test_who_queues_such_a_text_is_warned_once(model: Any) -> None:
    lookahead_hf.hook.state_of(model).warned.clear()
    texts, config = prompts(2, longest=9), settings(model, **LONG)
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match="runs plain generate") as told:
        found = model.generate_batch(texts, config).values()
    assert len(told) == 1
    assert all(output.speculative_stats.fallback_reason == "model" for output in found)
    strict = lookahead_hf.SpeculativeConfig(on_fallback="error")
    for output in model.generate_batch(texts, config, speculative=strict).values():
        assert "this call cannot be speculated" in output.error


def test_beams_of_all_requests_are_those_of_generate(model: Any) -> None:
    texts, config = prompts(2, longest=9), settings(model, num_beams=3)
    found = [*model.generate_batch(texts, config).values()]
    assert [output.generated_tokens for output in found] == [
        alone(model, text, config) for text in texts
    ]
    assert {output.speculative_stats.fallback_reason for output in found} == {"beams"}

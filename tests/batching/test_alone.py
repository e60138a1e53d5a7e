"""Requests that plain `generate` writes, since they cannot be decoded together with others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.helpers.requests import (
    WAIT,
    alone,
    broken_after,
    prompts,
    results,
    running,
    settings,
    speculated,
)


class Waits(LogitsProcessor):
    """Says that a text has a token, and waits there until the next one may be chosen."""

    def __init__(self) -> None:
        self.begun, self.goes_on, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.begun.set()
        assert self.goes_on.wait(WAIT)
        return scores


def test_what_generate_would_return_does_not_matter(model: Any) -> None:
    config, (text, other) = settings(model, return_dict_in_generate=True), prompts(2)
    with running(model, config) as manager:
        manager.add_request(text, request_id="alone", **broken_after(1000))
        manager.add_request(other, request_id="row")
        found = results(manager, 2)
    plain = settings(model)
    assert found["alone"].generated_tokens == alone(model, text, plain)
    assert found["alone"].speculative_stats.fallback_reason == "continuous_batching"
    assert found["row"].generated_tokens == alone(model, other, plain)
    speculated([found["row"]])


def test_a_cancelled_text_ends_and_other_requests_go_on(model: Any) -> None:
    config, texts, waits = settings(model, max_new_tokens=200), prompts(3), Waits()
    given = {"logits_processor": LogitsProcessorList([waits])}
    with running(model, config, max_slots=3) as manager:
        manager.add_request(texts[0], request_id="alone", **given)
        assert waits.begun.wait(WAIT)
        manager.add_request(texts[1], request_id="kept")
        manager.cancel_request("alone")
        waits.goes_on.set()
        found = results(manager, 1)
        manager.stop()
    assert manager.output_router.output_queue.empty()
    assert waits.calls == 1
    assert found["kept"].generated_tokens == alone(model, texts[1], config)
    speculated(found.values())


def test_a_hard_stop_ends_the_text(model: Any) -> None:
    config, texts, waits = settings(model, max_new_tokens=200), prompts(2), Waits()
    given = {"logits_processor": LogitsProcessorList([waits])}
    with running(model, config) as manager:
        manager.add_request(texts[0], request_id="alone", **given)
        assert waits.begun.wait(WAIT)
        manager.add_request(texts[1], request_id="waiting")
        manager.stop(block=False, hard_stop=True)
        waits.goes_on.set()
        found = results(manager, 2)
    assert waits.calls == 1
    assert all("stopped before" in output.error for output in found.values())


def test_a_greedy_text_leaves_the_default_generator_alone(model: Any) -> None:
    def draw(*_: Any) -> None:
        torch.rand(())

    config, (text,) = settings(model, max_new_tokens=6), prompts(1)
    with running(model, config) as manager:
        torch.manual_seed(5)
        hook = model.register_forward_pre_hook(draw)
        manager.add_request(text, request_id="alone", guidance_scale=1.5)
        found = results(manager, 1)
        hook.remove()
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert found["alone"].speculative_stats.fallback_reason is not None
    assert drawn != torch.rand(())  # what was drawn meanwhile was not taken back


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_waits_fails_when_a_processor_ends_the_thread(model: Any) -> None:
    class Exits(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert waits.goes_on.wait(WAIT)
            raise SystemExit

    config, texts, waits = settings(model), prompts(2), Waits()
    with running(model, config, max_slots=1) as manager:
        given = {"logits_processor": LogitsProcessorList([Exits()])}
        manager.add_request(texts[0], request_id="exits", **given)
        manager.add_request(texts[1], request_id="waits")
        waits.goes_on.set()
        found = results(manager, 2)
    assert all(output.error is not None for output in found.values())

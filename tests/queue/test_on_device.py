"""Queues in the steps of a device: one launch and one read for all rows, replayed from graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.engines.cuda import graphs
from lookahead_hf.runner.outputs import HostCopy
from tests.helpers import models
from tests.helpers.device import TapeRecorder, taped
from tests.helpers.requests import DRAFTED, alone, prompts, seeded, settings, speculated

COPIES = lookahead_hf.SpeculativeConfig(budget=6, drafters=("ngram",))
"""Drafts for which nothing but the verdict is read."""


@pytest.fixture(params=["llama", "gemma3", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return lookahead_hf.enable(models.tiny(request.param), default=DRAFTED)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapeRecorder]]:
    with taped(monkeypatch) as recorders:
        yield recorders


def num_replays(made: list[TapeRecorder]) -> int:
    return sum(each.num_replays for recorder in made for each in recorder.recordings)


def compare(model: Any, own: list[dict[str, Any]], **options: Any) -> None:
    """Compare the replayed texts of requests, which bring settings, with those of `generate`."""
    texts = prompts(len(own))
    requests = [{"input_ids": text, **each} for text, each in zip(texts, own, strict=True)]
    found = model.generate_batch(requests, settings(model), seeded(), **options).values()
    expected = [
        alone(model, text, settings(model, **own[index]), index) for index, text in enumerate(texts)
    ]
    assert [each.generated_tokens for each in found] == expected
    assert {each.execution for each in speculated(found)} == {"replayed"}


def test_a_step_is_one_launch_and_one_read(
    model: Any, made: list[TapeRecorder], live: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends, send = list[int](), HostCopy.send

    def sent(self: Any) -> None:
        sends.extend([1] if self._waiting else [])
        send(self)

    monkeypatch.setattr(HostCopy, "send", sent)
    config, texts = settings(model, max_new_tokens=60), prompts(7)
    found = model.generate_batch(texts, config, speculative=COPIES, max_slots=3).values()
    assert [each.generated_tokens for each in found] == [alone(model, t, config) for t in texts]
    assert {each.execution for each in speculated(found)} == {"replayed"}
    assert max(live) == 3
    assert num_replays(made) == len(sends) == len(live)


def test_rows_with_rules_of_their_own_are_decided_on_the_host(
    model: Any, made: list[TapeRecorder]
) -> None:
    rules = {"repetition_penalty": 1.3}, {"do_sample": True}, {"max_new_tokens": 50}
    compare(model, [own for each in rules for own in ({}, each)], max_slots=3)
    (kept,) = graphs.graphs_of(model).sets
    assert {decides for *_, decides in kept.recordings} == {True, False}


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_longer_text_moves_all_rows_to_larger_graphs(
    model: Any, made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LEAST_VISIBLE", 32)
    compare(model, [{"max_new_tokens": most} for most in (9, 60, 150, 20, 300)], max_slots=2)
    assert sum(bool(recorder.recordings) for recorder in made) > 1


def test_texts_of_one_prompt_begin_with_a_copy(model: Any, made: list[TapeRecorder]) -> None:
    text, config = prompts(1, 5)[0], settings(model, do_sample=True)
    found = model.generate_batch([text] * 4, config, seeded(), max_slots=3).values()
    assert [each.generated_tokens for each in found] == [
        alone(model, text, config, index) for index in range(4)
    ]
    speculated(found)

"""Requests that bring processors and criteria of classes that the library does not know."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from tests.helpers import users_parts
from tests.helpers.requests import alone, prompts, results, running, seeded, settings, speculated


class Edits(LogitsProcessor):
    """Writes into the text so far, as plain `generate` lets it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 5 == 0:
            input_ids[:, -2] = 7
        return scores


def processor(kind: Callable[[], Any]) -> dict[str, Any]:
    """Arguments of a request with a processor of its own."""
    return {"logits_processor": LogitsProcessorList([kind()])}


OBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda kind=kind: processor(kind) for name, kind in users_parts.PROCESSORS.items()},
    "edits": lambda: processor(Edits),
    "criterion": lambda: {
        "stopping_criteria": StoppingCriteriaList([users_parts.EndsRow([*range(5, 30)])])
    },
    "function": lambda: {"prefix_allowed_tokens_fn": users_parts.Allowed(draws=False)},
    "guidance": lambda: {"guidance_scale": 1.5},
}


def compare(model: Any, config: Any, given: Callable[[], list[dict[str, Any]]]) -> None:
    """Compare the texts of requests, which bring objects, with those of `generate`."""
    texts = prompts(len(given()))
    requests = [{"input_ids": text, **own} for text, own in zip(texts, given(), strict=True)]
    found = model.generate_batch(requests, config, seeded(), max_slots=len(texts)).values()
    expected = [
        alone(model, text, config, index, **own)
        for index, (text, own) in enumerate(zip(texts, given(), strict=True))
    ]
    assert [output.generated_tokens for output in found] == expected
    speculated(found)


def test_two_managers_draw_in_turn(model: Any) -> None:
    class Dawdles(users_parts.Draws):
        """Gives other threads time to draw in between."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return super().__call__(input_ids, scores)

    config, texts = settings(model, do_sample=True, max_new_tokens=8), prompts(3)
    with running(model, config) as one, running(model, config) as other:
        for manager in (one, other):
            for text in texts:
                manager.add_request(text, **processor(Dawdles))
        found = [results(manager, len(texts)) for manager in (one, other)]
    draws = processor(users_parts.Draws)
    expected = [alone(model, text, config, index, **draws) for index, text in enumerate(texts)]
    for outputs in found:
        assert [outputs[f"req_{index}"].generated_tokens for index in range(3)] == expected
        speculated(outputs.values())


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", OBJECTS)
def test_texts_are_decoded_beside_others(
    model: Any, live: list[int], name: str, do_sample: bool
) -> None:
    def given() -> list[dict[str, Any]]:
        return [OBJECTS[name]() if index % 2 else {} for index in range(4)]

    compare(model, settings(model, do_sample=do_sample), given)
    assert max(live) >= (2 if name in ("criterion", "function") else 4)


@pytest.mark.parametrize("kind", [list, tuple])
def test_every_object_sees_its_texts_in_their_order(model: Any, kind: Any) -> None:
    def given() -> list[dict[str, Any]]:
        one, other = users_parts.Counts(), users_parts.Counts()
        return [{"logits_processor": kind(own)} for own in ([one], [one, other], [other])]

    compare(model, settings(model, max_new_tokens=25), given)


def test_what_keeps_nothing_serves_texts_that_are_decoded_together(
    model: Any, live: list[int]
) -> None:
    shared = processor(lambda: RepetitionPenaltyLogitsProcessor(1.4))
    compare(model, settings(model), lambda: [shared] * 3)
    assert max(live) == 3


def test_the_texts_of_a_request_have_copies_of_the_object_as_it_was_added(model: Any) -> None:
    config = settings(model, do_sample=True, num_return_sequences=2)
    texts, counts = prompts(2), processor(users_parts.Counts)
    with running(model, config, max_slots=4) as manager:
        with manager.pause():
            for name, text in zip("ab", texts, strict=True):
                manager.add_request(text, request_id=name, **counts)
        found = results(manager, 4)
    once = processor(users_parts.Counts)
    for index, name in enumerate(("a__child#0", "a", "b__child#0", "b")):
        own = processor(users_parts.Counts) if "child" in name else once
        expected = alone(model, texts[index // 2], config, index, **own)
        assert found[name].generated_tokens == expected
    speculated(found.values())

"""A user's function that a processor calls is called exactly as in plain generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead_hf
from tests.helpers.compared import compared
from tests.helpers.models import VOCAB, prompt, tiny
from tests.helpers.random_calls import smallest
from tests.helpers.scripted import second_child_right


class Returns(LogitsProcessor):
    """Returns what a function makes of the scores."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.make(scores)


@pytest.mark.parametrize("drawn", [{"do_sample": False}, {"do_sample": True, "temperature": 0.6}])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [lambda _: None, lambda _: 3, lambda scores: scores[0]])
def test_a_processor_that_returns_no_scores_raises_plains_error(
    make: Any, rows: int, drawn: dict[str, Any]
) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    call = {"inputs": prompt(rows), "max_new_tokens": 4, "pad_token_id": 0, **drawn}
    call["logits_processor"] = LogitsProcessorList([Returns(make)])
    said = []
    for speculative in (False, True):
        with pytest.raises((TypeError, IndexError, AttributeError)) as raised:
            model.generate(**call, speculative=speculative)
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


class Budgeted:
    """Allows tokens by the number of its calls and by the row; may draw random numbers."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.asked: list[tuple[int, list[int]]] = []

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        self.asked.append((row, ids.tolist()))
        if self.draws:
            torch.rand(())
        first = len(self.asked) % 7
        return list(range(3 + first, VOCAB, 2 + row))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_function_that_chooses_the_allowed_tokens(name: str, rows: int, do_sample: bool) -> None:
    """It may count calls over all rows, or draw: a batch takes every step together."""
    model = smallest(name)
    call: dict[str, Any] = {"input_ids": prompt(rows), "max_new_tokens": 16, "pad_token_id": 0}
    call |= {"do_sample": do_sample, "top_k": 0, "eos_token_id": [11, 12]}
    asked: list[Budgeted] = []

    def given() -> dict[str, Any]:
        asked.append(Budgeted(do_sample))
        return {**call, "prefix_allowed_tokens_fn": asked[-1]}

    stats = compared(model, given, 12, second_child_right).stats
    assert asked[1].asked == asked[0].asked
    assert stats.engine == ("walk" if rows == 1 else "lockstep")

"""Scores, logits and states are plain's, entry by entry, in batches too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import lookahead_hf
from tests.helpers.compared import assert_close, left_to_plain
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted


class Watches(StoppingCriteria):
    """Keeps the scores that it is shown at every token."""

    def __init__(self) -> None:
        self.shown: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.shown.append(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def scored(model: Any, rows: int, truth: Any = None, criterion: Any = None) -> Any:
    """A call that returns scores; speculative where the text is known."""
    call: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    if criterion is not None:
        call["stopping_criteria"] = StoppingCriteriaList([criterion])
    if truth is not None:
        call["speculative"] = scripted(continuations(truth, 12), RandomTrees())
    with lookahead_hf.enabled(model):
        return model.generate(prompt(rows), max_new_tokens=20, do_sample=False, **call)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_sees_the_scores_so_far(rows: int) -> None:
    model, seen, expected = tiny("llama"), Watches(), Watches()
    plain = scored(model, rows, criterion=expected)
    ours = scored(model, rows, plain.sequences, seen)
    assert ours.speculative_stats.num_accepted > 0
    assert ours.speculative_stats.engine == ("walk" if rows == 1 else "lockstep")
    assert [len(shown) for shown in seen.shown] == [len(shown) for shown in expected.shown]
    assert_close(ours.scores, plain.scores)


def test_attentions_are_left_to_plain() -> None:
    call = {"inputs": prompt(), "max_new_tokens": 4, "output_attentions": True}
    left_to_plain(tiny("llama", "eager"), lambda: dict(call), r"output_attentions.*\[argument\]")

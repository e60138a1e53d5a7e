"""Scores, logits, states and attentions are plain's, entry by entry, in batches too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import lookahead_hf
from tests.helpers.compared import ALL, assert_close, compared
from tests.helpers.models import left_padded, prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted

PADS = {"alone": (0,), "batch": (0, 0, 0), "padded": (0, 4, 2)}


@pytest.mark.parametrize(
    ("attn", "kind", "do_sample"),
    [("eager", "alone", False), ("eager", "batch", True), ("sdpa", "padded", True)],
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "gemma4"])
def test_every_entry(name: str, attn: str, kind: str, do_sample: bool) -> None:
    model, inputs = tiny(name, attn), left_padded(PADS[kind], seed=5)
    call: dict[str, Any] = {"max_new_tokens": 20, "pad_token_id": 0, "do_sample": do_sample}
    call |= {"eos_token_id": [5, 6, 7, 8], "top_k": 20} if do_sample else {"eos_token_id": [5, 6]}
    plain, ours, stats = compared(model, lambda: {**inputs, **call, **ALL}, 12)
    assert ours.speculative_stats is stats
    assert_close(ours.scores, plain.scores)
    assert_close(ours.logits, plain.logits)
    assert_close(ours.hidden_states, plain.hidden_states)
    if attn == "sdpa":  # which returns no weights
        assert ours.attentions == plain.attentions
    elif kind != "padded":  # under pads plain's weights are of no meaning
        assert_close(ours.attentions, plain.attentions)
    steps = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    expected = model.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True)
    assert_close(steps, expected)


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
def test_scores_are_put_together_once_for_those_who_look(rows: int) -> None:
    model, seen, expected = tiny("llama"), Watches(), Watches()
    plain = scored(model, rows, criterion=expected)
    ours = scored(model, rows, plain.sequences, seen)
    assert ours.speculative_stats.num_accepted > 0
    assert ours.speculative_stats.engine == ("walk" if rows == 1 else "lockstep")
    assert [len(shown) for shown in seen.shown] == [len(shown) for shown in expected.shown]
    assert_close(ours.scores, plain.scores)
    for column, scores in enumerate(ours.scores):
        assert all(shown[column] is scores for shown in seen.shown[column:])

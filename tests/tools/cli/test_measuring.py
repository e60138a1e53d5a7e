"""Where two texts diverge, and how near a tie is there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.tools.cli.measuring import SHIFTS, Divergence, describe, find_divergences
from lookahead_hf.tools.cli.screen import CommandError
from tests.helpers.calls import padded
from tests.helpers.models import tiny

INDEX, ROW = 7, 1


@pytest.fixture(scope="module")
def model() -> Any:
    return lookahead_hf.enable(tiny("llama").bfloat16())


def written(model: Any, call: dict[str, Any], seed: int = 0) -> tuple[list[list[int]], Any]:
    """Plain's new tokens of each row, and its logits, [step][rows, vocab]."""
    torch.manual_seed(seed)
    output = model.generate(**call, output_logits=True, return_dict_in_generate=True)
    return output.sequences[:, call["input_ids"].shape[1] :].tolist(), output.logits


def call_of(**settings: Any) -> dict[str, Any]:
    return {**padded("left"), "max_new_tokens": 12, "pad_token_id": 0, "top_k": 0, **settings}


def ulps_of(gap: float, logits: torch.Tensor, *tokens: int) -> int | None:
    """The least shift that is tried and covers a gap between two of a row's logits in bfloat16."""
    size = max(*(abs(float(logits[token])) for token in tokens), float(logits.abs().median()))
    spacing = 2.0 ** (math.floor(math.log2(size)) - 7)
    return next((shift for shift in SHIFTS if gap <= shift * spacing), None)


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_a_planted_token_is_as_far_off_as_its_score(model: Any, temperature: float | None) -> None:
    """The oracle knows the formula: argmax(logits), or argmax(logits / T - log(noise))."""
    call = call_of(do_sample=temperature is not None, temperature=temperature or 1.0)
    plain, logits = written(model, call, seed=5)
    scores = logits[INDEX] / (temperature or 1.0)
    if temperature is not None:
        torch.manual_seed(5)
        noise = [torch.empty_like(scores).exponential_() for _ in range(INDEX + 1)]
        scores = scores - noise[INDEX].log()
    best = scores[ROW].topk(3).indices.tolist()
    assert plain[ROW][INDEX] == best[0]
    others = [[list(row) for row in plain] for _ in range(2)]
    for other, token in zip(others, best[1:], strict=True):
        other[ROW][INDEX] = token
    found = find_divergences(model, call, plain, others, seed=5)
    for (first, divergence, last), token in zip(found, best[1:], strict=True):
        assert first is None and last is None
        gap = float(scores[ROW, best[0]] - scores[ROW, token]) * (temperature or 1.0)
        ulps = ulps_of(gap, logits[INDEX][ROW], best[0], token)
        assert divergence == Divergence(ROW, INDEX, best[0], token, ulps)


def test_texts_of_several_runs_and_rows(model: Any) -> None:
    call = call_of(do_sample=False)
    plain, logits = written(model, call)
    far = int(logits[3][0].argmin())
    wrong = [[*plain[0][:3], far], plain[1], plain[2][:5]]  # the last ended without an end token
    same, divergences = find_divergences(model, call, plain, [plain, wrong])
    assert same == [None, None, None]
    assert divergences[0] == Divergence(0, 3, plain[0][3], far)
    assert divergences[1:] == [None, Divergence(2, 5, plain[2][5], None)]
    assert describe(same) == "identical, 3 of 3"
    assert describe(divergences) == "BUG: parts beyond near ties, 2 of 3"
    near, most, beyond = (Divergence(0, 3, 1, 2, ulps) for ulps in (4, 12, 16))
    assert describe([None, near]) == "parts at near ties only, 1 of 2 (at most 4 ulps)"
    assert most.is_near_tie and not beyond.is_near_tie


def test_a_text_that_plain_does_not_write_again(model: Any) -> None:
    call = call_of(do_sample=False)
    plain, _ = written(model, call)
    changed = [[(token + 1) % 100 for token in row] for row in plain]
    with pytest.raises(CommandError, match="did not write the same text again"):
        find_divergences(model, call, changed, [plain])

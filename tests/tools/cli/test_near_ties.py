"""Where two texts part, and how near a tie is there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.tools.cli.near_ties import SHIFTS, Divergence, describe, find_divergences
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


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_a_planted_token_is_as_far_off_as_its_score(
    model: Any, temperature: float | None, rank: int
) -> None:
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
    other = [list(row) for row in plain]
    other[ROW][INDEX] = best[rank]
    ((first, divergence, last),) = find_divergences(model, call, plain, [other], seed=5)
    assert first is None and last is None
    assert divergence is not None
    assert (divergence.row, divergence.num_same) == (ROW, INDEX)
    assert (divergence.plain, divergence.other) == (best[0], best[rank])
    gap = float(scores[ROW, best[0]] - scores[ROW, best[rank]]) * (temperature or 1.0)
    assert divergence.ulps == ulps_of(gap, logits[INDEX][ROW], best[0], best[rank])


def test_texts_of_several_runs_and_rows(model: Any) -> None:
    call = call_of(do_sample=False)
    plain, logits = written(model, call)
    far = int(logits[3][0].argmin())
    wrong = [[*plain[0][:3], far], plain[1], plain[2][:5]]
    same, divergences = find_divergences(model, call, plain, [plain, wrong])
    assert same == [None, None, None]
    assert divergences[1] is None
    for divergence, index in ((divergences[0], 3), (divergences[2], 5)):
        assert divergence is not None and not divergence.is_near_tie
        assert divergence.num_same == index
    assert divergences[2] is not None and divergences[2].other is None  # ended without an end token
    assert describe(same) == "identical, 3 of 3"
    assert describe(divergences) == "BUG: parts beyond near ties, 2 of 3"
    near = Divergence(0, 3, 1, 2, 4)
    assert describe([None, near]) == "parts at near ties only, 1 of 2 (at most 4 ulps)"
    assert not Divergence(0, 3, 1, 2, 8).is_near_tie


def test_a_text_that_plain_does_not_write_again(model: Any) -> None:
    call = call_of(do_sample=False)
    plain, _ = written(model, call)
    changed = [[(token + 1) % 100 for token in row] for row in plain]
    with pytest.raises(CommandError, match="did not write the same text again"):
        find_divergences(model, call, changed, [plain])

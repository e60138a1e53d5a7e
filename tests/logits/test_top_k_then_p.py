"""Top-k and top-p in one keep what the two keep, also where scores are tied."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.generation import logits_process as hf

from lookahead_hf.logits.warpers import TopKThenP

VOCAB = 5000


def scores_of(kind: str) -> torch.Tensor:
    """Scores of 64 nodes."""
    scores = 3 * torch.randn(64, VOCAB)
    if kind == "tied":
        return scores.mul(2).round().div(2)  # about 30 values
    if kind == "few":
        return scores.masked_fill(torch.rand_like(scores) > 0.002, -torch.inf)
    if kind == "nan":
        scores[::3, 7], scores[1::3, 9] = torch.nan, torch.inf
    return scores.to(torch.bfloat16).float() if kind == "bfloat16" else scores


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tied", "few", "nan"])
@pytest.mark.parametrize("top_k", [1, 50, 300, VOCAB + 1])
@pytest.mark.parametrize(("top_p", "least"), [(0.0, 1), (0.3, 1), (0.9, 5), (0.9, 60), (0.999, 1)])
def test_what_is_kept(
    kind: str, top_k: int, top_p: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = scores_of(kind)
    k = hf.TopKLogitsWarper(top_k, min_tokens_to_keep=least)
    p = hf.TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    # Every sort of CUDA is stable; that of a CPU need not be.
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    expected = p(None, k(None, scores))
    found = TopKThenP(k, p)(scores[:, :0].long(), scores)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)

"""The faster twins keep exactly what transformers' processors keep, also two processors in one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from lookahead_hf.logits.warpers import Ban, TopKThenP, TopP, twin

IDS = torch.zeros(1, 8, dtype=torch.long)


def row(vocab: int, spread: float, kind: str, seed: int) -> torch.Tensor:
    """A row of scores, [1, vocab]."""
    scores = spread * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    if kind == "bf16":
        scores = scores.bfloat16().float()
    if kind == "banned":
        scores[:, ::3] = -torch.inf
    if kind == "few":
        scores[:, 40:] = -torch.inf
    if kind == "level":
        scores = scores.round()
    return scores


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "banned", "few", "level"])
@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_what_the_original_keeps(top_p: float, kind: str):
    original = hf.TopPLogitsWarper(top_p)
    ours = twin(original)
    assert isinstance(ours, TopP)
    for vocab in (1, 5, 64, 1009, 8193):
        for seed, spread in enumerate((0.5, 3.0, 12.0)):
            scores = row(vocab, spread, kind, seed)
            before = scores.clone()
            assert same_bits(ours(IDS, scores), original(IDS, before.clone()))
            assert torch.equal(scores, before)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=40),
    top_p=st.floats(0, 1),
    keep=st.integers(1, 4),
)
def test_ties_and_odd_thresholds(values: list[float], top_p: float, keep: int):
    scores = torch.tensor(values * 30)[None]
    original = hf.TopPLogitsWarper(top_p, min_tokens_to_keep=keep)
    assert same_bits(TopP(original)(IDS, scores), original(IDS, scores.clone()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_come_out_as_from_the_original(bad: float):
    original = hf.TopPLogitsWarper(0.9)
    every = torch.full((1, 2048), bad)
    for scores in (every, torch.cat([torch.randn(1, 2048), every[:, :1]], 1)):
        assert same_bits(TopP(original)(IDS, scores), original(IDS, scores.clone()))


def test_other_processors_have_no_twin():
    for other in (hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.5, filter_value=-1.0)):
        assert twin(other) is other


BANS: dict[str, Any] = {
    "min_length": hf.MinLengthLogitsProcessor(9, [2, 5, 5000]),
    "min_length_reached": hf.MinLengthLogitsProcessor(8, 2),
    "min_new_tokens": hf.MinNewTokensLengthLogitsProcessor(5, 4, torch.tensor([2])),
    "min_new_tokens_reached": hf.MinNewTokensLengthLogitsProcessor(5, 3, [2]),
    "suppress": hf.SuppressTokensLogitsProcessor([1, 7, 5000]),
    "suppress_nothing": hf.SuppressTokensLogitsProcessor([]),
    "suppress_nothing_at_begin": hf.SuppressTokensAtBeginLogitsProcessor([], 8),
    "suppress_at_begin": hf.SuppressTokensAtBeginLogitsProcessor([5, 6], 8),
    "suppress_later": hf.SuppressTokensAtBeginLogitsProcessor([5, 6], 9),
}


@pytest.mark.parametrize("name", BANS)
def test_bans_equal_the_originals(name: str):
    ban = twin(BANS[name])
    assert isinstance(ban, Ban)
    for kind in ("fp32", "banned"):
        scores = row(1009, 3.0, kind, 1)
        before = scores.clone()
        assert same_bits(ban(IDS, scores), BANS[name](IDS, before.clone()))
        assert torch.equal(scores, before)


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
def test_top_k_and_top_p_in_one_keep_what_the_two_keep(
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

"""The faster twins keep exactly what transformers' processors keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from lookahead_hf.logits import warpers
from lookahead_hf.logits.warpers import Truncation, fuse, largest

IDS = torch.zeros(1, 8, dtype=torch.long)


def warper(name: str) -> Any:
    """A warper by a short name: T0.7, k50, p0.9, m0.05."""
    kind, value = name[0], float(name[1:])
    if kind == "k":
        return hf.TopKLogitsWarper(int(value))
    kinds = {"T": hf.TemperatureLogitsWarper, "p": hf.TopPLogitsWarper, "m": hf.MinPLogitsWarper}
    return kinds[kind](value)


RUNS = [
    "k50",
    "p0.9",
    "m0.05",
    "T0.7 k50 p0.9",
    "T1.3 k50 p0.9",
    "T0.7 p0.95",
    "T1.0 p0.999",
    "T0.3 m0.2",
    "T0.7 k20 p0.8 m0.1",
    "p0.9 k50",
    "m0.01 p0.5 k3",
    "k1",
    "p0.0",
    "p1.0",
    "m0.0",
    "m1.0",
]


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


def plain(run: list[Any], scores: torch.Tensor) -> torch.Tensor:
    return hf.LogitsProcessorList(run)(IDS, scores.clone())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "banned", "few", "level"])
@pytest.mark.parametrize("names", RUNS)
def test_a_run_keeps_what_the_originals_keep(names: str, kind: str):
    run = [warper(name) for name in names.split()]
    (truncation,) = fuse(run)
    assert isinstance(truncation, Truncation)
    for vocab in (5, 64, 1009, 8193):
        for seed, spread in enumerate((0.5, 3.0, 12.0)):
            scores = row(vocab, spread, kind, seed)
            given_bits = scores.clone()
            assert same_bits(truncation(IDS, scores), plain(run, scores))
            assert torch.equal(scores, given_bits)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=40),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    top_k=st.integers(1, 40),
    keep=st.integers(1, 4),
)
def test_ties_and_odd_thresholds(
    values: list[float], top_p: float, min_p: float, top_k: int, keep: int
):
    scores = torch.tensor(values * 30)[None]
    for cuts in (
        [hf.TopPLogitsWarper(top_p, min_tokens_to_keep=keep)],
        [hf.MinPLogitsWarper(min_p, min_tokens_to_keep=keep)],
        [hf.TopKLogitsWarper(top_k), hf.TopPLogitsWarper(top_p, min_tokens_to_keep=keep)],
    ):
        assert same_bits(Truncation(cuts)(IDS, scores), plain(cuts, scores))


@pytest.mark.parametrize("names", ["k50", "T0.7 k50 p0.9", "T0.7 p0.9", "p0.999", "T0.7 m0.05"])
def test_the_originals_are_not_needed_for_distinct_scores(
    names: str, monkeypatch: pytest.MonkeyPatch
):
    (truncation,) = fuse([warper(name) for name in names.split()])
    monkeypatch.setattr(truncation, "_cuts", [Silent(cut) for cut in truncation._cuts])
    monkeypatch.setattr(
        warpers, "_CUTS", {Silent: lambda head, cut: CUTS[type(cut.original)](head, cut.original)}
    )
    monkeypatch.setattr(
        warpers, "_lowest_by_sorting", lambda scores, cut: BY_SORTING(scores, cut.original)
    )
    for seed in range(20):
        truncation(IDS, row(49152, 2.5, "fp32", seed))


CUTS = dict(warpers._CUTS)
BY_SORTING = warpers._lowest_by_sorting


class Silent:
    """Stands for a warper that must not be called."""

    def __init__(self, original: Any) -> None:
        self.original = original


@pytest.mark.parametrize("top_p", [0.9, 0.999])
def test_equal_scores_at_the_cut_are_left_to_the_original(top_p: float):
    scores = torch.zeros(1, 4096)
    scores[0, :7] = 3.0
    truncation = Truncation([hf.TopPLogitsWarper(top_p)])
    assert truncation._lowest_kept(scores) is None
    assert same_bits(truncation(IDS, scores), plain([hf.TopPLogitsWarper(top_p)], scores))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_come_out_as_from_the_originals(bad: float):
    run = [warper(name) for name in ("T0.7", "k50", "p0.9", "m0.05")]
    every = torch.full((1, 2048), bad)
    for scores in (every, torch.cat([torch.randn(1, 2048), every[:, :1]], 1)):
        assert torch.equal(Truncation(run)(IDS, scores).isnan(), plain(run, scores).isnan())
        assert same_bits(Truncation(run)(IDS, scores), plain(run, scores))


@pytest.mark.parametrize("vocab", [1009, 49152, 151936])
def test_the_margin_of_top_p_covers_the_rounding_of_the_original(vocab: int):
    for spread in (0.5, 2.0, 6.0, 15.0):
        scores = row(vocab, spread, "fp32", vocab)
        ascending = scores.sort().values
        rounded = ascending.softmax(-1).cumsum(-1).double()
        exact = ascending.double().softmax(-1).cumsum(-1)
        off = (rounded - exact).abs()[0]
        shares = ascending.double().softmax(-1)[0].flip(0)
        additions = float(shares @ torch.arange(1, vocab + 1).double())
        assert float(off.max()) < 0.5 * (warpers._EXP_ERROR + warpers._ROUNDING * additions)
        listed = 256
        beyond = float(shares[listed:].sum())
        head = float(shares[:listed] @ torch.arange(1, listed + 1).double())
        margin = warpers._EXP_ERROR + warpers._ROUNDING * (head + beyond * vocab / 8)
        assert float(off[-listed:].max()) < 0.5 * margin


@pytest.mark.parametrize("vocab", [10, 1000, 49152, 49153])
@pytest.mark.parametrize("count", [1, 5, 114, 256])
def test_the_largest_scores_are_found(vocab: int, count: int):
    for kind in ("fp32", "level", "banned"):
        scores = row(vocab, 3.0, kind, vocab)[0]
        count = min(count, vocab)
        assert torch.equal(largest(scores, count), scores.topk(count).values)


def test_fuse_leaves_order_and_others_alone():
    repetition, normal = hf.RepetitionPenaltyLogitsProcessor(1.1), hf.LogitNormalization()
    run = [warper("T0.7"), warper("k5")]
    fused = fuse([repetition, *run, normal, warper("T0.5"), warper("p0.3"), warper("T2.0")])
    kinds = [type(p) for p in fused]
    assert kinds == [type(repetition), Truncation, type(normal), Truncation, type(run[0])]
    assert [type(p) for p in fuse([warper("T0.5"), normal])] == [type(run[0]), type(normal)]
    replacing = hf.TopKLogitsWarper(5, filter_value=-1.0)
    assert fuse([replacing]) == [replacing]


BANS: dict[str, Any] = {
    "min_length": hf.MinLengthLogitsProcessor(9, [2, 5, 5000]),
    "min_length_reached": hf.MinLengthLogitsProcessor(8, 2),
    "min_new_tokens": hf.MinNewTokensLengthLogitsProcessor(5, 4, torch.tensor([2])),
    "min_new_tokens_reached": hf.MinNewTokensLengthLogitsProcessor(5, 3, [2]),
    "suppress": hf.SuppressTokensLogitsProcessor([1, 7, 5000]),
    "suppress_at_begin": hf.SuppressTokensAtBeginLogitsProcessor([5, 6], 8),
    "suppress_later": hf.SuppressTokensAtBeginLogitsProcessor([5, 6], 9),
}


@pytest.mark.parametrize("name", BANS)
def test_bans_equal_the_originals(name: str):
    (twin,) = fuse([BANS[name]])
    assert isinstance(twin, warpers.Ban)
    for kind in ("fp32", "banned"):
        scores = row(1009, 3.0, kind, 1)
        before = scores.clone()
        assert same_bits(twin(IDS, scores), BANS[name](IDS, before.clone()))
        assert torch.equal(scores, before)


def test_a_cut_is_certain_only_where_no_rounding_could_move_it():
    scores = torch.full((1, 1000), -20.0)
    scores[0, :10] = torch.arange(10, 0, -1).float() / 1e4
    probs = scores[0].double().softmax(-1)
    edge = float(probs[:4].sum())
    exactly_there = Truncation([hf.TopPLogitsWarper(edge)])
    head = warpers._Head.of(scores[0], 256)
    assert head is not None
    assert warpers._top_p(head, exactly_there._cuts[0]) is None
    clear = warpers._top_p(head, hf.TopPLogitsWarper(edge - 0.03))
    assert clear is not None and clear.kept == 4
    assert np.isclose(head.total(), float((scores[0].double() - head.values[0]).exp().sum()))

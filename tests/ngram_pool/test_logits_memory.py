"""The memory of the target's best logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.ngram_pool.logits_memory import LANES, WAYS, LogitsMemory, find, top_rows

pytestmark = pytest.mark.usefixtures("compiles")

DTYPES = {"fp32": (torch.float32, torch.int32), "bf16": (torch.bfloat16, torch.int16)}


def bits_of(values: torch.Tensor, dtype: str) -> np.ndarray:
    kind, pattern = DTYPES[dtype]
    return values.to(kind).view(pattern).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 97, LANES, LANES + 1, 3 * LANES - 1, 49_152])
@pytest.mark.parametrize("kind", ["around zero", "all negative", "few values"])
def test_the_best_logits_are_found_exactly(dtype: str, vocab: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * 4 - 60 * (kind == "all negative")
    if kind == "few values":  # ties, and masked logits
        logits = torch.where(logits < -3, -torch.inf, logits.sign() * 2 + 1)
        logits[:, vocab // 2] = 1.0
    k = min(12, vocab)
    tokens, probs = top_rows(bits_of(logits, dtype), np.array([3, 0]), np.array([k, k]))
    rounded = logits.to(DTYPES[dtype][0]).float()
    # Best first, the lower id where two are equal
    expected = rounded.sort(dim=-1, descending=True, stable=True).indices[[3, 0], :k]
    np.testing.assert_array_equal(tokens, expected.numpy())
    exact = rounded.softmax(-1).topk(k).values[[3, 0]]
    near = {"rtol": 0.03, "atol": 1e-4} if vocab <= LANES else {"rtol": 0.6, "atol": 0.02}
    np.testing.assert_allclose(probs, exact, **near)
    assert (np.diff(probs) <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_logits_are_never_proposed(dtype: str) -> None:
    for value in (float("nan"), -float("nan"), float("inf")):
        logits = torch.zeros(1, 2 * LANES)
        logits[0, 17] = value
        tokens, probs = top_rows(bits_of(logits, dtype), np.array([0]), np.array([4]))
        assert 17 not in tokens
        assert np.isfinite(probs).all()


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 200_000)), max_size=60),
    places=st.sampled_from([1, 4, 16]),
)
def test_what_was_remembered_last_is_found(contexts: list[tuple[int, int]], places: int) -> None:
    memory, latest = LogitsMemory(2, places * WAYS), dict[tuple[int, int], int]()
    for number, (before, last) in enumerate(contexts):
        # A token of -1 says that there is nothing to remember.
        tokens = np.array([[-1 if number % 7 == 3 else number, 5]], np.int32)
        given = np.array([before]), np.array([last]), tokens, tokens.astype(np.float32)
        memory.remember(*given)
        if number % 7 != 3:
            latest |= {(-1, last): number, (before, last): number}
            assert memory.tokens[find(memory.keys, before, last)].tolist() == [number, 5]
    entries = {key: find(memory.keys, *key) for key in latest}
    found = {key: entry for key, entry in entries.items() if entry >= 0}
    # Nothing is lost but the oldest entries of a full place.
    assert len({*found.values()}) == len(found) == (memory.keys >= 0).sum()
    assert places > 1 or len(found) == min(WAYS, len(latest))
    for key, entry in found.items():
        assert memory.tokens[entry, 0] == memory.probs[entry, 0] == latest[key]

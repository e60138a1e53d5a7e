"""The memory of the target's best logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")
torch = pytest.importorskip("torch")

from lookahead_hf.ngram_pool import logits_memory as compiled  # noqa: E402
from lookahead_hf.ngram_pool.logits_memory import LANES, WAYS, top_rows  # noqa: E402
from tests.oracles import logits_memory as reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiles")

DTYPES = {"fp32": (torch.float32, torch.int32), "bf16": (torch.bfloat16, torch.int16)}


def bits_of(values: torch.Tensor, dtype: str) -> np.ndarray:
    kind, pattern = DTYPES[dtype]
    return values.to(kind).view(pattern).numpy()


def expected_tokens(values: torch.Tensor, dtype: str, k: int) -> np.ndarray:
    """Best first, the lower id where two are equal: a stable sort."""
    rounded = values.to(DTYPES[dtype][0]).float()
    return rounded.sort(dim=-1, descending=True, stable=True).indices[:, :k].numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 97, LANES, LANES + 1, 3 * LANES - 1, 49_152])
@pytest.mark.parametrize("shift", [0.0, -60.0], ids=["around-zero", "all-negative"])
def test_the_best_logits_are_found_exactly(dtype: str, vocab: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * 4 + shift
    k = min(12, vocab)
    tokens, probs = top_rows(bits_of(logits, dtype), np.array([3, 0]), np.array([k, k]))
    np.testing.assert_array_equal(tokens, expected_tokens(logits, dtype, k)[[3, 0]])
    exact = logits.to(DTYPES[dtype][0]).float().softmax(-1).topk(k).values[[3, 0]]
    np.testing.assert_allclose(probs, exact, rtol=0.6, atol=0.02)
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
@given(data=st.data(), dtype=st.sampled_from(list(DTYPES)), k=st.integers(1, 6))
def test_compiled_and_plain_search_agree(data: st.DataObject, dtype: str, k: int) -> None:
    vocab = data.draw(st.integers(1, 40))
    # Few distinct values, so that ties occur; -inf is what a masked logit holds.
    value = st.sampled_from([-float("inf"), -2.0, -0.0, 0.0, 0.5, 3.0])
    rows = data.draw(st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=1))
    rows = [row if max(row) > -float("inf") else [0.0] * vocab for row in rows]
    bits = bits_of(torch.tensor(rows), dtype)
    # -0.0 and 0.0 are equal numbers; the search sorts bit patterns.
    bits[bits == np.iinfo(bits.dtype).min] = 0
    which = np.arange(len(rows))
    counts = np.array([data.draw(st.integers(1, k)) for _ in rows])
    found = []
    for best in (compiled._top_rows, reference.top_rows):
        tokens = np.empty((len(rows), k), np.int32)
        probs = np.empty((len(rows), k), np.float32)
        best(bits, which, counts, tokens, probs)
        found.append((tokens, probs))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0.02, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 200_000)), max_size=60),
    places=st.sampled_from([1, 4, 16]),
)
def test_compiled_and_plain_memory_agree(contexts: list[tuple[int, int]], places: int) -> None:
    before = np.array([b for b, _ in contexts], np.int64)
    last = np.array([t for _, t in contexts], np.int64)
    tokens = np.arange(2 * len(contexts), dtype=np.int32).reshape(-1, 2)
    tokens[::7, 0] = -1
    kept = []
    for remember, find in (
        (compiled._remember, compiled.find),
        (reference.remember, reference.find),
    ):
        keys, stamps = np.full((places, WAYS), -1, np.int64), np.zeros((places, WAYS), np.int64)
        store = np.zeros((places * WAYS, 2), np.int32), np.zeros((places * WAYS, 2), np.float32)
        clock = remember(keys, stamps, *store, 0, before, last, tokens, tokens.astype(np.float32))
        found = [find(keys, b, t) for b, t in contexts]
        kept.append((keys, stamps, *store, np.array(found), np.array(clock)))
    for one, other in zip(*kept, strict=True):
        np.testing.assert_array_equal(one, other)

"""The compiled kernels against torch, and against themselves in other blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.fields import bits
from tests.helpers.programs import attended, linear, planned, run, tree_of
from tests.helpers.tiles import use_loops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(name="dtype", params=[*DTYPES, "tiles"], ids=str)
def _dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A dtype that there are kernels for; that of tiles once more, by loops in place of AMX."""
    if request.param != "tiles":
        return request.param
    use_loops(monkeypatch)
    return torch.bfloat16


SIZES = ((1, 1), (3, 5), (40, 33), (64, 96), (130, 4), (576, 48))
"""Inputs and outputs of a linear layer: multiples of a vector, and others."""


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())


def limit(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 7, 13, 19, 128])
def test_a_linear_layer_is_torchs(
    dtype: torch.dtype, sizes: tuple[int, int], num_tokens: int
) -> None:
    x, weight = torch.randn(num_tokens, sizes[0]).to(dtype), torch.randn(*sizes[::-1]).to(dtype)
    bias = torch.randn(sizes[1]).to(dtype)
    expected = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert error(linear(x, weight, bias), expected) < limit(dtype)
    without = nn.functional.linear(x.double(), weight.double())
    assert error(linear(x, weight), without) < limit(dtype)


def test_what_is_beside_a_token_does_not_change_its_bits(dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 200).to(dtype), torch.randn(70, 200).to(dtype)
    whole = linear(x, weight)
    for width in (1, 2, 3, 4, 5, 6, 7, 12, 13, 33):
        parts = [linear(x[at : at + width].clone(), weight) for at in range(0, 64, width)]
        assert torch.equal(torch.cat(parts), whole), width


def test_results_are_added_times_a_factor() -> None:
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    added = linear(x, weight, MODE=fields.ADD, FACTOR=bits(0.25))
    assert error(added, 1 + 0.25 * x @ weight.T) < 1e-5


@pytest.mark.parametrize(
    ("flavour", "own"), [(fields.SILU, nn.SiLU()), (fields.GELU_TANH, nn.GELU(approximate="tanh"))]
)
def test_activations_are_torchs(flavour: int, own: nn.Module, dtype: torch.dtype) -> None:
    x = torch.linspace(-100, 100, 4001, dtype=dtype)[:, None]
    x.view(torch.int8)[0] = -1  # NaN whose last bits are set
    made = linear(x, torch.ones(1, 1, dtype=dtype), FLAVOUR=flavour).float()
    torch.testing.assert_close(
        made, own(x.float()), rtol=limit(dtype), atol=limit(dtype) / 10, equal_nan=True
    )


@pytest.mark.parametrize("size", [7, 48, 576])
@pytest.mark.parametrize("flavour", range(4))
def test_norms(dtype: torch.dtype, size: int, flavour: int) -> None:
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((9, size), (size,), (size,)))
    wide, w = x.float(), weight.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = {
        fields.RMS: weight * scaled.to(dtype),
        fields.RMS_WEIGHTED_WIDE: (w * scaled).to(dtype),
        fields.RMS_FROM_ONE: (scaled * (1 + w)).to(dtype),
        fields.LAYER_NORM: nn.functional.layer_norm(wide, (size,), w, bias.float(), 1e-5),
    }[flavour]
    out = torch.empty_like(x)
    run(
        [
            {
                fields.KIND: fields.NORM,
                fields.SOURCE: x.data_ptr(),
                fields.TARGET: out.data_ptr(),
                fields.WEIGHT: weight.data_ptr(),
                fields.BIAS: bias.data_ptr() if flavour == fields.LAYER_NORM else 0,
                fields.SIZE: size,
                fields.HEADS: 1,
                fields.FLAVOUR: flavour,
                fields.EPSILON: bits(1e-5),
            }
        ],
        dtype,
        len(x),
    )
    assert error(out, expected) < limit(dtype)


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("window", "scale"), [(0, 1.0), (5, 1.0), (0, 1e6)])
def test_attention_is_torchs(
    dtype: torch.dtype, dim: int, heads: int, shared: int, window: int, scale: float
) -> None:
    rows, width, slots, scale = 3, 9, 40, 1.0 if dtype is torch.float16 else scale
    q = (scale * torch.randn(rows, width, heads, dim)).to(dtype)
    k, v = ((scale * torch.randn(rows, slots, shared, dim)).to(dtype) for _ in range(2))
    seen, part = tree_of(rows, width, slots, dim + heads, window)
    hidden = torch.from_numpy(~seen.any(1))
    k[hidden] = v[hidden] = float("nan")  # what no token sees is not read
    expected = nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2).double(),
        k.nan_to_num().transpose(1, 2).double(),
        v.nan_to_num().transpose(1, 2).double(),
        attn_mask=torch.from_numpy(seen)[:, None],
        enable_gqa=True,
    ).transpose(1, 2)
    assert error(attended(q, k, v, part), expected) < limit(dtype)


def test_scores_are_limited() -> None:
    q, k, v = torch.randn(1, 3, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    seen, part = tree_of(1, 3, 20, 0)
    scores = torch.einsum("btHd,bsHd->bHts", 4 * q, k) / 4
    scores = 2.0 * torch.tanh(scores / 2.0)
    weights = scores.masked_fill(~torch.from_numpy(seen)[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("bHts,bsHd->btHd", weights, v)
    assert error(attended(4 * q, k, v, part, limit=2.0), expected) < 1e-5


def test_attention_has_the_same_bits_wherever_unseen_tokens_are(dtype: torch.dtype) -> None:
    """A node sees its ancestors in other slots, beside other nodes, in another row."""
    heads, dim, length, depth = 2, 48, 37, 4
    q = torch.randn(1, depth, heads, dim).to(dtype)
    k, v = (torch.randn(1, 64, heads, dim).to(dtype) for _ in range(2))
    _, chain = planned(np.arange(depth)[None] - 1, np.array([length]), 64)
    whole = attended(q, k, v, chain)
    places = [2, 3, 7, 11]  # of the chain's tokens in a block of 12
    wide_q = torch.randn(2, 12, heads, dim).to(dtype)
    wide_k, wide_v = (torch.randn(2, 64, heads, dim).to(dtype) for _ in range(2))
    parents = np.full((2, 12), -1)
    parents[1, places] = [-1, *places[:-1]]
    wide_k[1, :length], wide_v[1, :length] = k[0, :length], v[0, :length]
    for at, place in enumerate(places):
        wide_q[1, place] = q[0, at]
        wide_k[1, length + place], wide_v[1, length + place] = k[0, length + at], v[0, length + at]
    _, part = planned(parents, np.array([length - 5, length]), 64)
    assert torch.equal(attended(wide_q, wide_k, wide_v, part)[1, places], whole[0])

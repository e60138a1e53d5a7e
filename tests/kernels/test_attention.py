"""tree_attention against plain attention over the gathered text of each node.

It is the one kernel without a twin: elsewhere a model's own attention reads the mask of the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lookahead_hf.kernels import attention
from tests.helpers.trees import random_tree, under_mask

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    # Triton's interpreter multiplies the bit patterns of bfloat16 blocks.
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
# rows, heads, kv_heads, nodes, dim, v_dim, slots
SHAPES = [
    (2, 4, 2, 5, 32, 32, 80),
    (1, 7, 1, 16, 64, 64, 300),
    (2, 14, 2, 11, 80, 80, 400),
    (1, 4, 1, 64, 96, 48, 130),
    (2, 4, 2, 9, 32, 32, 9),  # no prefix
    pytest.param((3, 28, 4, 48, 128, 128, 3000), marks=pytest.mark.gpu),
]


def ancestor_words(parents: torch.Tensor) -> torch.Tensor:
    """Bits of each node's ancestors, itself included, [rows, nodes]."""
    words = torch.zeros_like(parents)
    for row in range(len(parents)):
        for node in range(parents.shape[1]):
            above = 0 if node == 0 else int(words[row, parents[row, node]])
            words[row, node] = torch.tensor(above) | (torch.tensor(1) << node)
    return words


def random_case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    lengths: list[int] | None = None,
) -> dict[str, Any]:
    """Cache and trees; slots behind a row's nodes hold NaN, as unwritten memory may."""
    rows, heads, kv_heads, nodes, dim, v_dim, slots = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    parents, _, _ = random_tree(rows, nodes - 1, generator)
    if lengths is None:
        drawn = torch.randint(0, slots - nodes + 1, (rows - 1,), generator=generator)
        lengths = [slots - nodes, *drawn.tolist()]
    k, v = random(rows, slots, kv_heads, dim), random(rows, slots, kv_heads, v_dim)
    for row, length in enumerate(lengths):
        k[row, length + nodes :] = float("nan")
        v[row, length + nodes :] = float("nan")
    return {
        "q": random(rows, nodes, heads, dim).to(device).transpose(1, 2),
        "k": k.to(device).transpose(1, 2),
        "v": v.to(device).transpose(1, 2),
        "lengths": torch.tensor(lengths, device=device),
        "ancestors": ancestor_words(parents).to(device),
        "scale": dim**-0.5,
    }


def plain(case: dict[str, Any]) -> torch.Tensor:
    """Attention under a mask that shows every node its text, in float64."""
    q, k, v = (case[name].double().cpu().nan_to_num() for name in "qkv")
    rows, _, nodes, _ = q.shape
    mask = torch.full((rows, 1, nodes, k.shape[2]), -1.0)
    for row in range(rows):
        length = int(case["lengths"][row])
        for node in range(nodes):
            word = int(case["ancestors"][row, node])
            drafted = [j for j in range(64) if word >> j & 1]
            slots = torch.tensor([*range(length), *(length + j for j in drafted)])
            columns = torch.arange(len(slots))
            if case.get("columns") is not None:
                columns = columns + case["pads"][row].cpu()
                listed = case["columns"][row].cpu()
                known = min(len(listed), length)
                columns[:known] = listed[:known]
            near = columns[-1] - columns < case.get("window", len(slots) + 1000)
            mask[row, 0, node, slots[near]] = 0.0
    sinks = case.get("sinks")
    sinks = None if sinks is None else sinks.cpu()
    return under_mask(mask, q, k, v, case["scale"], case.get("softcap"), sinks)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF_BACKEND", "triton")


def check(case: dict[str, Any]) -> None:
    got = attention.tree_attention(**case)
    assert got.dtype == case["q"].dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double().cpu(), plain(case), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(random_case(shape, dtype, device))


@pytest.mark.parametrize("window", [1, 150])
def test_window(device: torch.device, window: int) -> None:
    check(random_case(SHAPES[1], torch.float32, device) | {"window": window})


@pytest.mark.parametrize(
    ("lengths", "further"),
    [([395, 310], {}), ([0, 130], {}), ([64, 257], {"window": 150})],
    ids=str,
)
def test_programs_share_what_a_row_holds(
    device: torch.device,
    lengths: list[int],
    further: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph is launched as it was captured, for all the lengths that fit its cache."""
    monkeypatch.setattr(attention, "_processors", lambda _: 3)
    case = random_case((2, 2, 1, 5, 16, 16, 400), torch.float32, device, lengths)
    case |= {"by_length": True, **further}
    check(case)
    expected = attention.tree_attention(**case)
    for name in "kv":
        roomy = torch.full((2, 1000, 1, 16), float("nan"), device=device)
        roomy[:, :400] = case[name].transpose(1, 2)
        case[name] = roomy.transpose(1, 2)
    assert torch.equal(attention.tree_attention(**case), expected)


@pytest.mark.parametrize("window", [2, 130])
def test_window_by_column(device: torch.device, window: int) -> None:
    """Prompts with holes: their columns are listed, later ones follow from the row's pads."""
    case = random_case((2, 4, 2, 5, 32, 32, 300), torch.float32, device, [280, 190])
    generator = torch.Generator().manual_seed(0)
    listed = torch.randint(1, 4, (2, 200), generator=generator).cumsum(1)
    pads = torch.stack([listed[0, -1] - 199, listed[1, 189] - 189]) + 9
    case |= {"window": window, "columns": listed.to(device), "pads": pads.to(device)}
    check(case)


def test_nodes_on_both_sides_of_a_cut(device: torch.device) -> None:
    """Chains in which some nodes read a tile of the prefix for themselves that others share."""
    lengths = [125, 60, 189, 127]
    case = random_case((4, 2, 1, 5, 32, 32, 200), torch.float32, device, lengths)
    chain = torch.arange(-1, 4).expand(4, -1)
    case["ancestors"] = ancestor_words(chain).to(device)
    check(case)


def test_softcap_and_sinks(device: torch.device) -> None:
    case = random_case(SHAPES[0], torch.float32, device)
    case["q"] = case["q"] * 4
    check(case | {"softcap": 2.5})
    check(case | {"sinks": torch.tensor([-1.0, 0.0, 1.5, 9.0], device=device)})
    check(case | {"sinks": torch.zeros(4, device=device), "softcap": 20.0, "window": 11})


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_tree(
    device: torch.device, dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has the same bits as a node of any tree, at any depth, behind any prefix."""

    def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        return np.add.reduce(a[..., :, :, None] * b[..., None, :, :], axis=-2, dtype=dtype)

    # As on a GPU: numpy's own product may add up the last rows of a tile in another order.
    monkeypatch.setattr(np, "matmul", product)
    text, nodes, slots = 210, 6, 256
    generator = torch.Generator().manual_seed(4)
    q_text = torch.randn(text, 3, 32, generator=generator).to(dtype)
    k_text, v_text = torch.randn(2, text, 1, 32, generator=generator).to(dtype)

    def last_token(depth: int) -> torch.Tensor:
        """The text's last token at some depth of a random tree that holds the tokens before it."""
        length = text - 1 - depth
        on_path = torch.randperm(nodes - 1, generator=generator)[:depth].sort().values + 1
        q = torch.randn(nodes, 3, 32, generator=generator).to(dtype)
        k, v = torch.randn(2, slots, 1, 32, generator=generator).to(dtype)
        k[:length], v[:length] = k_text[:length], v_text[:length]
        parents = torch.zeros(1, nodes, dtype=torch.int64)
        above = 0
        for place, node in enumerate([0, *on_path.tolist()]):
            parents[0, node] = above
            above = node
            q[node] = q_text[length + place]
            k[length + node], v[length + node] = k_text[length + place], v_text[length + place]
        out = attention.tree_attention(
            q[None].to(device).transpose(1, 2),
            k[None].to(device).transpose(1, 2),
            v[None].to(device).transpose(1, 2),
            torch.tensor([length], device=device),
            ancestor_words(parents).to(device),
            32**-0.5,
            window=window,
        )
        return out[0, above]

    expected = last_token(0)
    assert all(torch.equal(last_token(depth), expected) for depth in (1, 2, 5))

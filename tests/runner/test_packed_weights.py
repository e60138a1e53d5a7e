"""Packed weights give the results of the weights, and a write to a weight changes its checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from lookahead_hf.runner import packed_weights
from lookahead_hf.runner.packed_weights import checksum, pack, served_tokens
from tests.helpers.packing import needs_packing


def groups(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        ((random(96, 64), None),),
        ((random(64, 96), random(64)),),
        ((random(96, 64), None), (random(32, 64), None)),
    ]


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_packing()
    monkeypatch.setattr(packed_weights, "time_share", lambda *_: 0.0)


@pytest.mark.parametrize(("dtype", "first"), [(torch.bfloat16, 1), (torch.float32, 4)])
def test_packed_layers_give_the_layers_results(dtype: torch.dtype, first: int) -> None:
    for group in groups(dtype):
        served, multiply = served_tokens(group), pack(group)
        assert served[0] == first and served[-1] >= packed_weights.FEWEST_SERVED
        for rows, width in ((1, 1), (1, 9), (3, 7)):
            x = torch.randn(rows, width, group[0][0].shape[1]).to(dtype)
            own = torch.cat([linear(x, *layer) for layer in group], -1)
            slack = 2e-6 * own.abs().max() if dtype == torch.float32 else 0.0
            assert (multiply(x, group[0][1]) - own).abs().max() <= slack


@pytest.mark.parametrize(
    ("dtype", "wrong_from", "served"),
    [
        (torch.bfloat16, 17, range(0)),
        (torch.bfloat16, 128, range(1, 66)),
        (torch.float32, 17, range(0)),
        (torch.float32, 128, range(4, 66)),
    ],
)
def test_other_results_limit_the_tokens_served(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wrong_from: int, served: range
) -> None:
    def off_by_a_little(group: Any) -> Any:
        multiply = pack(group)
        return lambda x, bias: multiply(x, bias) * (1.0 + (x.shape[1] >= wrong_from) * 0.01)

    monkeypatch.setattr(packed_weights, "pack", off_by_a_little)
    assert [served_tokens(group) for group in groups(dtype)] == [served] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_that_are_slower_serve_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(packed_weights, "time_share", lambda *_: 2.0)
    assert [served_tokens(group) for group in groups(dtype)] == [range(0)] * 3


def one_element(weight: torch.Tensor) -> None:
    weight[3, 5] += 1.0


def two_rows(weight: torch.Tensor) -> None:
    weight[[0, 1]] = weight[[1, 0]]


def columns(size: int) -> Any:
    """As where the heads of an attention change places."""

    def swap(weight: torch.Tensor) -> None:
        first, second, rest = weight.clone().split([size, size, weight.shape[1] - 2 * size], 1)
        weight.copy_(torch.cat([second, first, rest], 1))

    return swap


def signs(weight: torch.Tensor) -> None:
    """An even number of signs, which sums of bits pass over."""
    weight[::6, [1, 3]] *= -1


WRITES = [one_element, two_rows, signs, columns(1), columns(4), columns(16)]


@pytest.mark.parametrize("write", WRITES)
def test_every_write_changes_the_checksum(write: Any) -> None:
    weight = groups()[0][0][0]
    before = checksum(weight)
    assert torch.equal(checksum(weight.clone()), before)
    write(weight.data)
    assert not torch.equal(checksum(weight), before)


def test_no_two_bytes_of_a_row_have_the_same_factors() -> None:
    factors = packed_weights._factors(4_096)
    assert len(factors.unique(dim=0)) == len(factors) and factors.any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_value_of_an_element_has_sums_of_its_own(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype == torch.float32:
        patterns *= 65521  # all four bytes change
    rows = groups(dtype)[0][0][0][:1].repeat(len(patterns), 1)
    rows[:, 5] = patterns.to(getattr(torch, f"int{8 * rows.itemsize}")).view(dtype)
    assert len(checksum(rows).unique(dim=0)) == len(patterns)


def test_plenty_of_memory_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(weight.nbytes for group in groups() for weight, _ in group)
    for free, fits in ((4 * total + 1, True), (4 * total, False), (None, False)):
        monkeypatch.setattr(packed_weights, "free_memory", lambda free=free: free)
        assert packed_weights.fits(groups()) is fits


@pytest.mark.parametrize(
    ("missing", "most", "free"),
    [
        ("", "5000000\n", 4_000_000),
        ("", "max\n", 8_192_000),
        ("cgroup", "", 8_192_000),
        ("/", "", None),
    ],
)
def test_free_memory_is_that_of_the_control_group(
    missing: str, most: str, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "/sys/fs/cgroup/memory.max": most,
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }

    def read_text(path: Path) -> str:
        if missing and missing in str(path):
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert packed_weights.free_memory() == free

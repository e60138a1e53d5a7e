"""Packed weights give the bits of the weights, and are noticed to be old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lookahead_hf.runner.program import compiled, groups_of, key_of
from lookahead_hf.runner.tracing import Tracer
from torch.nn.functional import linear

from lookahead_hf.runner import packed_linear
from lookahead_hf.runner.packed_linear import PackedWeights
from tests.helpers.packing import needs_packing


def weights(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    torch.manual_seed(0)
    return [
        ((torch.randn(96, 64).to(dtype), None),),
        ((torch.randn(64, 96).to(dtype), torch.randn(64).to(dtype)),),
        ((torch.randn(96, 64).to(dtype), None), (torch.randn(32, 64).to(dtype), None)),
    ]


def own(group: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What the layers of a group give by themselves."""
    return [linear(x, weight, bias) for weight, bias in group]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers too small to be faster packed count as faster."""
    monkeypatch.setattr(packed_linear, "GAIN", float("inf"))


def test_packed_layers_give_the_same_bits(always: None) -> None:
    needs_packing()
    groups = weights()
    packed = PackedWeights(groups)
    assert packed.linears.keys() == set(map(key_of, groups))
    for group in groups:
        for shape in ((1, 1), (1, 9), (3, 7)):
            x = torch.randn(*shape, group[0][0].shape[1]).bfloat16()
            assert all(map(torch.equal, packed.linears[key_of(group)](x), own(group, x)))


def test_float32_is_as_near_as_rounding_permits(always: None) -> None:
    groups = weights(torch.float32)
    packed = PackedWeights(groups)
    assert packed.linears.keys() == set(map(key_of, groups))
    assert not packed.same_bits
    assert PackedWeights(groups[:0]).same_bits
    for group in groups:
        x = torch.randn(1, 9, group[0][0].shape[1])
        for ours, theirs in zip(packed.linears[key_of(group)](x), own(group, x), strict=True):
            assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


class Tied(torch.nn.Module):
    """Two layers with one weight and a bias of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))
        self.first, self.second = (torch.nn.Parameter(torch.randn(64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = linear(linear(x, self.weight, self.first), self.weight, self.second)
        return linear(x, self.weight)


@torch.no_grad()
def test_layers_that_share_a_weight_keep_their_biases(always: None) -> None:
    model, x = Tied().eval(), torch.randn(1, 5, 64)
    with (tracer := Tracer(model, {"x": x})):
        plain = model(x)
    trace = tracer.trace(plain)
    packed = PackedWeights(groups_of(trace))
    assert len(packed.linears) == 3
    again = compiled(trace, packed.linears).run(5, [], x)
    assert (again - plain).abs().max() <= 1e-5 * plain.abs().max()


class Joined(torch.nn.Module):
    """Layers of one input, as attention and gated units have them, and one that stands alone."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            torch.nn.Linear(64, size, bias=False) for size in (96, 32, 64)
        )
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.first(x).view(*x.shape[:-1], 3, 32))
        if self.writes:
            x = x + 0
            x.mul_(2)
        out = torch.cat([gate.mean(-2) * self.second(x)] * 2, -1)
        return self.last(out)


@torch.no_grad()
def group_sizes(model: torch.nn.Module) -> list[int]:
    """How many layers are packed together; what the packed program gives has the model's bits."""
    model = model.bfloat16().eval()
    x = torch.randn(1, 5, 64).bfloat16()
    with (tracer := Tracer(model, {"x": x})):
        plain = model(x)
    trace = tracer.trace(plain)
    packed = PackedWeights(groups_of(trace))
    assert torch.equal(compiled(trace, packed.linears).run(5, [], x), plain)
    return sorted(map(len, packed.linears))


@pytest.mark.parametrize("writes", [False, True])
def test_layers_of_one_input_are_multiplied_as_one(always: None, writes: bool) -> None:
    needs_packing()
    torch.manual_seed(0)
    assert group_sizes(Joined(writes)) == ([1, 1, 1] if writes else [1, 2])


def test_layers_that_gain_nothing_together_are_packed_alone(
    always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_packing()
    real = packed_linear._gains
    monkeypatch.setattr(packed_linear, "_gains", lambda group: len(group) == 1 and real(group))
    assert group_sizes(Joined(writes=False)) == [1, 1, 1]


def test_half_precision_keeps_its_bits(always: None) -> None:
    needs_packing()
    assert PackedWeights(weights()).same_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_results_leave_the_weights_as_they_are(
    always: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    real = packed_linear.packed

    def off_by_a_little(group: Any) -> Any:
        layers = real(group)
        return lambda x: tuple(out * (1.0 + (x.shape[1] == 17) * 0.01) for out in layers(x))

    needs_packing()
    monkeypatch.setattr(packed_linear, "packed", off_by_a_little)
    assert PackedWeights(weights(dtype)).linears == {}


def test_what_is_no_faster_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "GAIN", 0.0)
    assert PackedWeights(weights()).linears == {}


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_were_written_to_are_noticed(always: None, through_data: bool) -> None:
    needs_packing()
    layers = weights()
    packed = PackedWeights(layers)
    assert packed.is_current()
    written = layers[1][0][0].data if through_data else layers[1][0][0]
    written[3, 5] += 1.0
    assert not packed.is_current()
    written[3, 5] -= 1.0


def test_rows_in_another_order_are_noticed(always: None) -> None:
    needs_packing()
    layers = weights()
    packed = PackedWeights(layers)
    weight = layers[0][0][0]
    weight.data[[0, 1]] = weight.data[[1, 0]]
    assert not packed.is_current()


@pytest.mark.parametrize("size", [1, 4, 16])
def test_columns_in_another_order_are_noticed(always: None, size: int) -> None:
    """As where the heads of an attention change places."""
    needs_packing()
    layers = weights()
    packed = PackedWeights(layers)
    weight = layers[0][0][0].data
    first, second, rest = weight.clone().split([size, size, weight.shape[1] - 2 * size], 1)
    weight.copy_(torch.cat([second, first, rest], 1))
    assert not packed.is_written()
    assert not packed.is_current()


def test_writing_is_counted_in_every_step(always: None) -> None:
    needs_packing()
    layers = weights()
    packed = PackedWeights(layers)
    assert not packed.is_written()
    layers[2][1][0].add_(0)
    assert packed.is_written()


@torch.inference_mode()
def test_weights_that_are_not_counted_are_summed(always: None) -> None:
    needs_packing()
    layers = weights()
    packed = PackedWeights(layers)
    layers[0][0][0].mul_(-1.0)
    assert not packed.is_written()
    assert not packed.is_current()


def test_plenty_of_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = weights()
    total = sum(weight.nbytes for group in layers for weight, _ in group)
    for free, fits in ((4 * total + 1, True), (4 * total, False), (None, False)):
        monkeypatch.setattr(packed_linear, "free_memory", lambda free=free: free)
        assert packed_linear.fits(layers) is fits


def test_free_memory_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "/sys/fs/cgroup/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert packed_linear.free_memory() == 4_000_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert packed_linear.free_memory() == 8_192_000
    del files["/sys/fs/cgroup/memory.max"]
    assert packed_linear.free_memory() == 8_192_000
    files.clear()
    assert packed_linear.free_memory() is None

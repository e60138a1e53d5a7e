"""What a forward asks torch to do is noted whole, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lookahead_hf.runner.program import compiled, generalized
from lookahead_hf.runner.tracing import Tracer, Untraceable


class Layer(nn.Module):
    """A weight, a buffer and whatever the test does with them."""

    def __init__(self, body: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def traced(body: Callable[[Any, torch.Tensor], torch.Tensor], *widths: int) -> tuple[Any, Any]:
    """A layer, and its program from traces at these widths."""
    layer = Layer(body).eval()
    traces = []
    for width in widths:
        x = torch.randn(1, width, 4)
        tracer = Tracer(layer, {"x": x})
        with torch.no_grad(), tracer:
            out = layer(x)
        traces.append(tracer.trace(out))
    trace = traces[0] if len(traces) == 1 else generalized(traces, widths)
    return layer, compiled(trace)


def shapes(layer: Any, x: torch.Tensor) -> torch.Tensor:
    rows, width, size = x.shape
    heads = layer.linear(x).view(rows, width, 2, size // 2).transpose(1, 2)
    first, *_ = heads.chunk(2, dim=-1)
    return torch.cat([first, heads[..., 1:]], -1).transpose(1, 2).reshape(rows, -1, 4)


def in_place(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out += layer.scale
    out[:, 0] = out[:, -1]
    out.mul_(layer.scale).clamp_(max=1.5)
    return torch.relu_(out)


def positions(layer: Any, x: torch.Tensor) -> torch.Tensor:
    width = x.size(1)
    ahead = torch.arange(width)[None, :, None] + torch.full((1, 2 * width - 1, 1), 0.5)[:, :width]
    return x.to(torch.float32).contiguous() * ahead.float() + torch.zeros_like(x)


def places(layer: Any, x: torch.Tensor) -> torch.Tensor:
    order = x[0, :, 0].argsort()
    return x[:, order // 2].masked_fill(x > 1.0, 0.0)


def several(layer: Any, x: torch.Tensor) -> torch.Tensor:
    best = x.max(-1)
    values, indices = torch.topk(x, 2)
    return (
        best.values[..., None] + values + indices + torch.where(x > 0, 1.0, float("-inf"))[..., :2]
    )


@pytest.mark.parametrize("body", [shapes, in_place, positions, places, several])
def test_a_program_gives_the_forwards_bits_at_any_width(
    body: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    layer, program = traced(body, 2, 5, 65)
    for width in (1, 2, 3, 8, 17):
        x = torch.randn(1, width, 4)
        with torch.no_grad():
            assert torch.equal(program.run(width, [], x), layer(x))


def test_weights_that_were_written_to_are_seen() -> None:
    layer, program = traced(shapes, 3, 5)
    with torch.no_grad():
        layer.linear.weight.mul_(3.0)
        layer.scale.add_(1.0)
        x = torch.randn(1, 4, 4)
        assert torch.equal(program.run(4, [], x), layer(x))


def reads_a_value(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def reads_a_number(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * x.abs().max().item()


def reads_a_list(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(x[0, 0].tolist())


def writes_into_the_model(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.scale.add_(1.0)
    return x * layer.scale


def sizes_of_what_is_found(layer: Any, x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.where(x[0, :, 0] > 100.0)
    return x if found.shape[0] == 0 else layer.linear(x)


def sizes_of_what_a_mask_leaves(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * x[x > 0].numel()


def draws(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def writes_through_a_view(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.scale.view(1)[:1] += 1.0
    return x * layer.scale


def writes_out(layer: Any, x: torch.Tensor) -> torch.Tensor:
    torch.add(layer.scale.data, 1.0, out=layer.scale.data)
    return x * layer.scale


def from_outside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * OUTSIDE


OUTSIDE = torch.ones(4)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (reads_a_value, "__bool__"),
        (reads_a_number, "item"),
        (reads_a_list, "tolist"),
        (writes_into_the_model, "writes into the model"),
        (writes_through_a_view, "writes into the model"),
        (writes_out, "writes into the model"),
        (sizes_of_what_is_found, "sizes depend on values"),
        (sizes_of_what_a_mask_leaves, "sizes depend on values"),
        (draws, "random numbers"),
        (from_outside, "neither the model's nor made here"),
    ],
)
def test_what_would_not_repeat_is_refused(
    body: Callable[[Any, torch.Tensor], torch.Tensor], reason: str
) -> None:
    with pytest.raises(Untraceable, match=reason):
        traced(body, 3)


@pytest.mark.parametrize("body", [draws, writes_into_the_model, writes_through_a_view])
def test_what_is_refused_is_not_done(body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    layer, x = Layer(body).eval(), torch.ones(1, 3, 4)
    before = torch.get_rng_state()
    with torch.no_grad(), pytest.raises(Untraceable), Tracer(layer, {"x": x}):
        layer(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(layer.scale) == 2.0


def branches(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] > 4 else layer.linear(x)


def branches_where_wide(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] > 8 else layer.linear(x)


def up_to_eight(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, : min(x.shape[1], 8)] * 2, x[:, min(x.shape[1], 8) :]], 1)


def squares(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1] ** 2 + 1, 4)], 1) * (1.0 + x.shape[1] / 2)


@pytest.mark.parametrize("body", [branches, branches_where_wide, up_to_eight, squares])
def test_what_does_not_follow_the_width_is_refused(
    body: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(Untraceable, match=r"number of tokens"):
        traced(body, 3, 5, 17)


def test_opaque_functions_are_noted_as_one_call() -> None:
    calls: list[int] = []

    def attend(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[1])  # a program that ran what is inside would not come by here
        return x * x.shape[1]

    layer = Layer(lambda layer, x: x).eval()
    x = torch.randn(1, 3, 4)
    tracer = Tracer(layer, {"x": x})
    with torch.no_grad(), tracer:
        out = tracer.opaque(attend)(x + 1)
    program = compiled(tracer.trace(out))
    again = torch.randn(1, 6, 4)
    assert torch.equal(program.run(6, [], again), (again + 1) * 6)
    assert calls == [3, 6]

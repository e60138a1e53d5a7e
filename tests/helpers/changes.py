"""A small Llama with an adapter, and changes to it that the next call or step must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.helpers.compiled import Lora


def adapted(make: Callable[[], Any]) -> Any:
    """Return a model that `make` makes, with an adapter in its first layer.

    That layer runs its own code. The changes are to others.
    """
    torch.manual_seed(3)
    model = make()
    attended = model.model.layers[0].self_attn
    attended.q_proj = Lora(attended.q_proj)
    return model


def lora_of(model: Any) -> Lora:
    return model.model.layers[0].self_attn.q_proj


def merged(model: Any) -> None:
    lora_of(model).merge()


def replaced_parameter(model: Any) -> None:
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = nn.Parameter(-layer.weight.detach())


def replaced_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = -weight.data


def given_a_bias(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.bias = nn.Parameter(torch.ones(96, dtype=layer.weight.dtype))


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, args, out: out * 2)


# Changes to a small Llama without an adapter, each of which the model's own code can run.


def _mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def negated_view(model: Any) -> None:
    """The numbers in memory have the other sign."""
    weight = _mlp(model).up_proj.weight
    weight.data = torch._neg_view(weight.data)


def zeros_without_memory(model: Any) -> None:
    weight = _mlp(model).up_proj.weight
    weight.data = torch._efficientzerotensor(weight.shape)


def tied(model: Any) -> None:
    """Two layers read the same memory."""
    mlp = _mlp(model)
    mlp.gate_proj.weight.data = mlp.up_proj.weight.data


def sliced(model: Any) -> None:
    """The numbers begin within the memory."""
    weight = _mlp(model).up_proj.weight
    weight.data = torch.cat([-weight.data, weight.data[:1]])[1:]


def refilled(model: Any) -> None:
    """The memory is freed, and there is other memory in its place."""
    weight = _mlp(model).up_proj.weight
    numbers = -weight.detach().clone()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(numbers.numel() * numbers.element_size())
    weight.detach().copy_(numbers)


class Quantised(nn.Linear):
    """A linear layer that holds whole numbers and a scale, as those of bitsandbytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.abs().max() / 3
        return nn.functional.linear(x, (self.weight / scale).round() * scale)


def quantised(model: Any) -> None:
    _mlp(model).up_proj.__class__ = Quantised


def hidden_child(model: Any) -> None:
    """An attribute of the object comes before a module of that name."""
    mlp = _mlp(model)
    inner = mlp.up_proj
    vars(mlp)["up_proj"] = lambda x: inner(x) * 2


def hidden_weight(model: Any) -> None:
    layer = _mlp(model).up_proj
    vars(layer)["weight"] = -layer.weight.detach()


def hidden_method(model: Any) -> None:
    """The method of Gemma's norms; the activation of others."""
    layer = model.model.layers[1]
    if hasattr(layer.input_layernorm, "_norm"):
        layer.input_layernorm._norm = lambda x: x * 0.5
    else:
        vars(layer.mlp)["act_fn"] = torch.tanh


def doubled(model: Any) -> None:
    """The model goes on in float64, and its cache does not."""
    model.to(torch.float64)


def on_meta(model: Any) -> None:
    layer = _mlp(model).up_proj
    layer.weight = nn.Parameter(layer.weight.to("meta"))


def freed(model: Any) -> None:
    _mlp(model).up_proj.weight.untyped_storage().resize_(0)


def shrunk(model: Any) -> None:
    memory = _mlp(model).up_proj.weight.untyped_storage()
    memory.resize_(memory.nbytes() // 2)


ODD = (
    negated_view, zeros_without_memory, tied, sliced, refilled, quantised, hidden_child,
    hidden_weight, hidden_method,
)  # fmt: skip
"""Changes after which a model goes on."""

BREAKING = (doubled, freed, shrunk)
"""Changes after which it does not."""

"""A small Llama with an adapter, and changes to it that the next call or step must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lookahead_hf.model import compat
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


def switched(model: Any) -> None:
    lora_of(model).is_on = False


def moved_on(model: Any) -> None:
    """As an optimiser's step does."""
    with torch.no_grad():
        lora_of(model).base.weight.mul_(-1.0)


def transposed(model: Any) -> None:
    """Other strides at the same address."""
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.T


def expanded(model: Any) -> None:
    weight = model.model.layers[2].self_attn.o_proj.weight
    weight.data = weight.data[:1].expand(len(weight), -1)


def replaced_module(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(48, 96, bias=False)
    model.model.layers[1].mlp.up_proj.weight.data.fill_(0.1)


def adapted_later(model: Any) -> None:
    attended = model.model.layers[2].self_attn
    attended.k_proj = type(lora_of(model))(attended.k_proj)


def pre_hooked(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
    )


def replaced_forward(model: Any) -> None:
    """As accelerate does for its own hooks."""
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2


def other_class(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.model.layers[1].mlp.up_proj.__class__ = Doubled


def rescaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= -3.0


def other_epsilon(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 0.5


def other_activation(model: Any) -> None:
    model.model.layers[2].mlp.act_fn = nn.Tanh()


def called_in_another_way(model: Any) -> None:
    """As `torch.compile` does for a module."""
    mlp = model.model.layers[1].mlp
    vars(mlp)[compat.CALL] = lambda x: 1.3 * compat.own_call(mlp, x)


def swapped_layers(model: Any) -> None:
    first, second = model.model.layers[1].mlp, model.model.layers[2].mlp
    model.model.layers[1].mlp, model.model.layers[2].mlp = second, first


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

BREAKING = (doubled, freed, shrunk)  # Changes after which it does not

CHANGES = (
    switched, moved_on, replaced_parameter, replaced_data, merged, transposed, expanded,
    replaced_module, adapted_later, given_a_bias, hooked, pre_hooked, replaced_forward, other_class,
    rescaled, other_epsilon, other_activation, called_in_another_way, swapped_layers, *ODD,
)  # fmt: skip
"""Changes to an adapted Llama, all of which the next forward must see."""

IN_PLACE = (moved_on, refilled)  # Those that may leave all objects and addresses as they are

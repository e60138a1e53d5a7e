"""A small Llama with an adapter, and changes to it that the next call or step must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.helpers.compiled import Lora


def adapted(make: Callable[[], Any]) -> Any:
    """Return a model that `make` makes, with an adapter around one of its layers."""
    torch.manual_seed(3)
    model = make()
    attended = model.model.layers[1].self_attn
    attended.q_proj = Lora(attended.q_proj)
    return model


def lora_of(model: Any) -> Lora:
    return model.model.layers[1].self_attn.q_proj


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

"""Attention implementations, and the masks that a decoder takes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    eager_mask,
    flash_attention_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from lookahead_hf.model.compat.caches import STATE_ATTENTION, WITHOUT_ATTENTION
from lookahead_hf.model.compat.forwards import text_config
from lookahead_hf.model.state import state_of

SDPA = sdpa_attention_forward
"""transformers' own attention by torch's function, which has neither soft caps nor sinks."""


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations from which modules read their attention's name."""
    # By `vars`, since a module's getattr is slow for missing attributes.
    found = {id(config): config for m in modules if (config := vars(m).get("config"))}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


def registry_configs(model: nn.Module, configs: Iterable[Any]) -> list[Any]:
    """Return the `configs` whose modules look the attention's name up in the registry.

    Falcon's modules and sparse attention, which has an indexer, compare it with the names that they
    know, and choose wrongly by any other.
    """
    state = state_of(model)
    if state.fixed_attention is None:
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        compares = any(part._modules.get("indexer") is not None for part in model.modules())
        fixed = {
            id(part.config) for part in parts if compares or not part._can_set_attn_implementation()
        }
        state.fixed_attention = fixed
    return [c for c in configs if id(c) not in state.fixed_attention]


def attention_name(config: Any) -> str | None:
    """Return the name of the attention implementation that a configuration asks for."""
    return config._attn_implementation_internal


def set_attention_name(config: Any, name: str | None) -> None:
    """Set the name for this configuration alone; the property also sets it for its parts."""
    config._attn_implementation_internal = name


def attention_function(name: str) -> Any:
    """Return the attention function registered under a name, None if there is none."""
    return ALL_ATTENTION_FUNCTIONS.get(name)


def eager_attention(module: nn.Module) -> Any:
    """Return the eager attention function of the file that defines a module."""
    forward = inspect.unwrap(type(module).forward)
    return forward.__globals__["eager_attention_forward"]


def is_flash(function: Any) -> bool:
    """Return whether an attention function is transformers' own for any flash attention.

    It takes a mask of columns or none. Versions from the kernels hub are registered under names of
    their own and call the same function.
    """
    return function is flash_attention_forward


def under_own_name(module: nn.Module, name: str) -> nn.Module:
    """Return a view of an attention module by a name, by which flash attention is chosen."""
    view = copy.copy(module)
    view.config = copy.copy(module.config)
    set_attention_name(view.config, name)
    return view


def is_stock_attention(function: Any, module: nn.Module) -> bool:
    """Return whether attention is transformers' and torch's own.

    `function` is the registered one; None if the file of the attention module defines it.
    """
    if function is None:  # other files may have any code by that name
        file = eager_attention(module).__globals__["__name__"]
        return str(file).partition(".")[0] == "transformers"
    if is_flash(function):
        return True
    stock = torch._C._nn.scaled_dot_product_attention
    is_torchs = torch.nn.functional.scaled_dot_product_attention is stock
    return is_torchs and function is SDPA


def has_stock_masks(name: str) -> bool:
    """Return whether transformers makes the masks of an attention implementation."""
    stock = (eager_mask, flash_attention_mask, sdpa_mask)
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name) in stock


def has_only_flash_beside_eager(model: nn.Module) -> bool:
    """Return whether a model has eager and flash attention, but not sdpa with all that they do."""
    caps = getattr(text_config(model), "attn_logit_softcapping", None)  # which sdpa looks past
    return bool(getattr(model, "_supports_flash_attn", False)) and (
        caps is not None or not getattr(model, "_supports_sdpa", True)
    )


def register_attention(name: str, function: Any, like: str) -> None:
    """Register an attention function whose masks are built like those of `like`."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[like])


def mask_kinds(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the masks that the decoder takes as a dict, or of its single mask.

    Models whose configuration has layer types read `attention_mask[layer_type]` from a dict. Others
    build a sliding mask if it has a window, as their cache does, else a causal one.
    """
    config = text_config(model)
    if takes_mask_dict(model):
        kinds = {STATE_ATTENTION.get(kind, kind) for kind in config.layer_types}
        return tuple(sorted(kinds - WITHOUT_ATTENTION)) or ("full_attention",)
    windowed = getattr(config, "sliding_window", None) is not None
    return ("sliding_attention",) if windowed else ("full_attention",)


def additive_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [rows, 1, width, columns]: 0 for what is `seen`, the lowest number elsewhere."""
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen[:, None], torch.zeros_like(lowest), lowest)


def window(model: nn.Module) -> int | None:
    """Return the most columns that a sliding or chunked layer sees, None without such layers."""
    config = text_config(model)
    widths = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return max((width for width in widths if width), default=None)


def takes_mask_dict(model: nn.Module) -> bool:
    """Return whether the decoder accepts a dict of masks by layer type.

    All decoders of transformers with layer types do, except the ones without any attention.
    """
    return not set(getattr(text_config(model), "layer_types", None) or ()) <= WITHOUT_ATTENTION


def crossing_layers(model: nn.Module) -> Sequence[int]:
    """Return the layers that attend to a picture instead of the text, as in Mllama."""
    return getattr(text_config(model), "cross_attention_layers", None) or ()


def layer_masks(model: nn.Module) -> tuple[str | None, ...]:
    """Return the name of each layer's mask, None if it attends to a picture, or the one of all."""
    config, kinds = text_config(model), mask_kinds(model)
    if crossing := crossing_layers(model):
        layers = range(config.num_hidden_layers)
        return tuple(None if layer in crossing else kinds[0] for layer in layers)
    if not takes_mask_dict(model):
        return kinds
    types = (STATE_ATTENTION.get(kind, kind) for kind in config.layer_types)
    return tuple(kinds[0] if kind in WITHOUT_ATTENTION else kind for kind in types)

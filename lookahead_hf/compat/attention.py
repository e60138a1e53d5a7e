"""Names and functions of attention, and the masks that a decoder takes."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    eager_mask,
    sdpa_mask,
)
from transformers.modeling_utils import (
    ALL_ATTENTION_FUNCTIONS,
    AttentionInterface,
    PreTrainedModel,
)

from lookahead_hf.compat.forwards import decoder_sources, text_config


def attention_configs(model: nn.Module) -> list[Any]:
    """Every configuration object that the model's modules read their attention's name from."""
    found = {id(config): config for m in model.modules() if (config := getattr(m, "config", None))}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


def registry_configs(model: nn.Module) -> list[Any]:
    """Those of them whose modules look the name up in the registry.

    Falcon's, and some that are loaded as remote code, ask which of two names it is: another one
    sends them the wrong way.
    """
    configs, asking = attention_configs(model), _asking_configs.get(model)
    if asking is None:
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        asking = {id(part.config) for part in parts if not part._can_set_attn_implementation()}
        _asking_configs[model] = asking
    return [config for config in configs if id(config) not in asking]


_asking_configs: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()


def attention_name(config: Any) -> str | None:
    """Name of the attention implementation that a configuration asks for."""
    return config._attn_implementation_internal


def set_attention_name(config: Any, name: str | None) -> None:
    """Name another implementation, for this object only: the property sets those below it too."""
    config._attn_implementation_internal = name


def attention_function(name: str) -> Any:
    """The registered attention function of that name; None for one that is not registered."""
    return ALL_ATTENTION_FUNCTIONS.get(name)


def eager_attention(module: nn.Module) -> Any:
    """The eager attention function that a module's own file has."""
    forward = inspect.unwrap(type(module).forward)
    return forward.__globals__["eager_attention_forward"]


def is_stock_attention(function: Any, module: nn.Module) -> bool:
    """Whether attention is what transformers and torch make of it, and nobody has replaced it.

    Args:
        function: The registered function; None where the module's file has the function.
        module: The attention module.
    """
    if function is None:
        package = type(module).__module__.partition(".")[0]
        return bool(eager_attention(module).__module__.partition(".")[0] == package)
    stock = torch._C._nn.scaled_dot_product_attention
    is_torchs = torch.nn.functional.scaled_dot_product_attention is stock
    return is_torchs and function is sdpa_attention_forward


def has_stock_masks(name: str) -> bool:
    """Whether the masks of an attention implementation are made by transformers."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name) in (eager_mask, sdpa_mask)


def has_only_flash_beside_eager(model: nn.Module) -> bool:
    """Whether a model says that its attention is eager or flash attention, but never sdpa."""
    supports = getattr(model, "_supports_sdpa", True), getattr(model, "_supports_flash_attn", False)
    return supports == (False, True)


def register_attention(name: str, function: Any, like: str) -> None:
    """Register an attention function whose masks are built as those of `like`."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[like])


def mask_kinds(model: nn.Module) -> tuple[str, ...]:
    """Names of the masks that the decoder takes as a dict; one name where it takes a single mask.

    Models that mix layer types read `attention_mask[layer_type]` when handed a dict. Models of one
    type build a sliding mask where their configuration has a window, a plain causal one otherwise.
    """
    config = text_config(model)
    sources = decoder_sources(model)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and any("attention_mask, dict)" in s for s in sources):
        return tuple(sorted(set(layer_types)))
    sliding = any("create_sliding_window_causal_mask" in source for source in sources)
    windowed = getattr(config, "sliding_window", None) is not None
    return ("sliding_attention",) if sliding and windowed else ("full_attention",)


def window(model: nn.Module) -> int | None:
    """Columns that a sliding or chunked layer sees at most; None where the model has none."""
    config = text_config(model)
    widths = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return max((width for width in widths if width), default=None)


def takes_mask_dict(model: nn.Module) -> bool:
    """Whether the decoder accepts a dict of masks by layer type."""
    has_types = bool(getattr(text_config(model), "layer_types", None))
    return has_types and any("attention_mask, dict)" in s for s in decoder_sources(model))


def layer_masks(model: nn.Module) -> tuple[str, ...]:
    """Name of the mask that each layer of the decoder takes; one name where all take the same."""
    kinds = mask_kinds(model)
    return tuple(text_config(model).layer_types) if takes_mask_dict(model) else kinds

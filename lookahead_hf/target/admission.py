"""Which models, caches and arguments the target can serve, decided before the prompt is run."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf import compat
from lookahead_hf.cache import held
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.target import probe
from lookahead_hf.target.attention import SERVED

MASK_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

UNSERVED_TYPES = frozenset(
    {
        "bloom",
        "cpmant",
        "ctrl",
        "deepseek_v4",
        "minimax",
        "moshi",
        "mpt",
        "openai-gpt",
        "prophetnet",
    }
    | {"reformer", "roformer", "rwkv", "xlm", "xlnet", "xlstm"}
)
"""Model types whose positions or biases do not follow from position ids and a mask."""


def check(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise Unserved where this call's model, cache or arguments cannot be served."""
    check_model(model)
    _check_cache(generation_config, model_kwargs)
    _check_arguments(model, generation_config, model_kwargs)


def check_model(model: Any) -> None:
    """Raise Unserved where this model cannot be served in any call."""
    config = compat.text_config(model)
    if model.config.model_type in UNSERVED_TYPES or config.model_type in UNSERVED_TYPES:
        raise Unserved(FallbackReason.MODEL, f"model type {model.config.model_type!r}")
    if getattr(model, "_is_stateful", False):
        raise Unserved(FallbackReason.STATEFUL, type(model).__name__)
    needed = {"position_ids", "past_key_values", "attention_mask"}
    missing = needed - compat.forward_arguments(model)
    if missing:
        raise Unserved(FallbackReason.MODEL, f"its forward takes no {', '.join(sorted(missing))}")
    unknown = set(compat.mask_kinds(model)) - MASK_KINDS
    if unknown:
        raise Unserved(FallbackReason.MODEL, f"layer type {', '.join(sorted(unknown))}")
    _check_attention(model)
    if not probe.serves(model):
        raise Unserved(
            FallbackReason.MODEL, f"{type(model).__name__} gives other logits for blocks"
        )


def check_room(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], num_new: int
) -> None:
    """Raise Unserved where a cache has no room for a call's longest text; plain says so itself.

    Args:
        model: The target.
        generation_config: As prepared by `generate`.
        model_kwargs: As prepared by `generate`.
        num_new: Most tokens that the call generates; the last of them is never fed.
    """
    columns = compat.known_mask_length(generation_config, model_kwargs)
    room = held.room(model_kwargs["past_key_values"], compat.window(model))
    if room is not None and columns is not None and columns + num_new - 1 > room:
        raise Unserved(FallbackReason.CACHE, f"a static cache of {room} columns")


def is_on(model: Any, device: torch.device) -> bool:
    """Whether all of the model is on this device."""
    return all(parameter.device == device for parameter in model.parameters())


def check_invariance(model: Any) -> None:
    """Raise Unserved where a token's bits depend on the other tokens of its block."""
    if compat.has_experts(model):
        raise Unserved(FallbackReason.INVARIANCE, type(model).__name__)


def _check_attention(model: Any) -> None:
    name = compat.attention_name(compat.text_config(model))
    if name is not None and name.removeprefix("lookahead:") not in SERVED:
        raise Unserved(FallbackReason.ATTENTION, f"attention implementation {name!r}")


def _check_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    cache = model_kwargs.get("past_key_values")
    if type(cache) not in compat.CACHES:
        raise Unserved(FallbackReason.CACHE, f"a cache of type {type(cache).__name__}")
    if name := held.unserved_layer(cache):
        raise Unserved(FallbackReason.CACHE, name)
    weights = generation_config.return_dict_in_generate and generation_config.output_attentions
    if weights and type(cache) is compat.StaticCache:
        raise Unserved(FallbackReason.CACHE, "attention weights over all of a static cache's room")


def _check_arguments(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    if model_kwargs.get("position_ids") is None:
        raise Unserved(FallbackReason.ARGUMENT, "position_ids that generate could not prepare")
    known = compat.PREPARED | compat.PROMPT_ONLY
    for name, value in model_kwargs.items():
        if name not in known and isinstance(value, torch.Tensor):
            raise Unserved(FallbackReason.ARGUMENT, f"the argument {name!r}")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise Unserved(FallbackReason.ARGUMENT, f"an attention mask of {mask.dim()} dimensions")

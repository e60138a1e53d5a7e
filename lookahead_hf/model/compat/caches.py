"""Caches of transformers, and the recurrent states that they may hold."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache

from lookahead_hf.model.compat.forwards import text_config

EmptyLayer = getattr(cache_utils, "DummyLayer", DynamicLayer)
"""Type of a layer without K and V of its own; up to 5.19 an ordinary layer that stays empty."""

INDEXED_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicIndexedLayer", "StaticIndexedLayer")
    if hasattr(cache_utils, name)
)
"""Types of layers that also hold the keys by which sparse attention chooses tokens."""

CACHES = (DynamicCache, StaticCache)
"""Types of caches that are nothing but a list of layers; subclasses do not count."""


def empty_cache(model: Any) -> Any:
    """Return an empty cache like the one that `generate` makes."""
    config = text_config(model)
    cache = DynamicCache(config=config)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=config))


def self_attention(cache: Any) -> Any:
    """Return the part of a cache that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def with_self_attention(cache: Any, grows: Any) -> Any:
    """Return a cache like `cache` in which another part `grows` with the text."""
    if not isinstance(cache, EncoderDecoderCache):
        return grows
    return EncoderDecoderCache(grows, cache.cross_attention_cache)


def is_users_cache(cache: Any) -> bool:
    """Return whether the caller of `generate` passed this cache, and so sees it afterwards."""
    return bool(getattr(cache, "_is_user_defined", False))


_HYBRIDS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
HYBRID_LAYERS = tuple(getattr(cache_utils, name) for name in _HYBRIDS if hasattr(cache_utils, name))
"""Types of layers of a cache that hold K and V, and beside them a state."""

StateLayer: Any = getattr(cache_utils, "LinearAttentionLayer", EmptyLayer)
"""Type of a layer of a cache that holds a state and no K and V."""

STATE_ATTENTION = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The attention of layer types with K, V and a state."""

WITHOUT_ATTENTION = frozenset({"conv", "linear_attention", "mlp", "moe"})
"""Layer types without attention."""

_STATES = frozenset(
    {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
)
"""Methods of a cache that read and write states."""


@functools.lru_cache(maxsize=4096)
def is_mixer(kind: Any) -> bool:
    """Return whether the forward of a class of modules reads and writes a state in the cache."""
    forward = getattr(kind, "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
    return code is not None and bool(_STATES & set(code.co_names))


_WHOLE = frozenset(
    {"bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe"}
    | {"lfm3", "mamba2", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "zaya"}
)
"""Models of transformers whose mixers go on from their state with any number of tokens. Mamba 1 and
Jamba ignore the state, Zamba 2 and Nemotron-H limit time steps."""


def takes_blocks(mixer: nn.Module) -> bool:
    """Return whether a mixer treats several tokens as single ones: no limit of time steps."""
    package, _, name = type(mixer).__module__.rpartition(".models.")
    limit = tuple(getattr(mixer, "time_step_limit", None) or (0.0, math.inf))
    return package == "transformers" and name.split(".")[0] in _WHOLE and limit == (0.0, math.inf)


def states_of(mixer: Any, cache: Any) -> list[tuple[dict[int, torch.Tensor], int]]:
    """Return the places of a mixer's states: dicts of tensors [rows, ...], each with its key."""
    layer = cache.layers[mixer.layer_idx]
    held = [(kept, key) for kept in (layer.conv_states, layer.recurrent_states) for key in kept]
    return [(kept, key) for kept, key in held if kept[key] is not None]


def without_padding(mixer: Any) -> Callable[..., Any]:
    """Return a mixer's forward that pads a short block to its own length only.

    In torch, transformers computes the delta rule and Mamba 2 in chunks, and pads a block to a
    whole chunk of 64 or 256 tokens. At 17 tokens of Qwen3.5-0.8B chunks of 17 take 1 ms instead of
    13. A mixer without such a function, or on another device, keeps its own forward.
    """
    own: Callable[..., Any] = mixer.forward
    if any(parameter.device.type != "cpu" for parameter in mixer.parameters()):
        return own
    function = inspect.unwrap(type(mixer).forward)
    found = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    short = {
        name: _short(each)
        for name, each in found.items()
        if isinstance(each, FunctionType) and "chunk_size" in inspect.signature(each).parameters
    }
    if not short:
        return own
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **short},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copied, mixer)


def _short(function: Any) -> Callable[..., Any]:
    usual = inspect.signature(function).parameters["chunk_size"].default

    def short(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call with chunks no longer than the block; the first argument is [rows, tokens, ...]."""
        size = min(kwargs.pop("chunk_size", usual), x.shape[1])
        return function(x, *args, chunk_size=size, **kwargs)

    return short


def with_states(masks: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor | None]:
    """Add the masks that layers with a state look up; blocks hold no padding."""
    names = {name: masks.get(kind) for name, kind in STATE_ATTENTION.items()}
    return {**masks, **names, **dict.fromkeys(WITHOUT_ATTENTION)}

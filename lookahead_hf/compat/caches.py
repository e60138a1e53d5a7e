"""transformers' caches and their layers."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache

from lookahead_hf.compat.forwards import text_config

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

"""transformers' caches and their layers."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    StaticCache,
)

from lookahead_hf.compat.forwards import text_config

EmptyLayer = getattr(cache_utils, "DummyLayer", DynamicLayer)
"""What stands for a layer without K and V of its own; up to 5.19 one that stays empty."""

CACHES = (DynamicCache, StaticCache)
"""Caches, by exact type, that are nothing but a list of layers."""


def empty_cache(model: Any) -> Any:
    """An empty cache as `generate` makes it."""
    config = text_config(model)
    cache = DynamicCache(config=config)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=config))


def self_attention(cache: Any) -> Any:
    """The part of a cache that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def with_self_attention(cache: Any, grows: Any) -> Any:
    """The cache to hand a model in place of `cache` where another part `grows` with the text."""
    if not isinstance(cache, EncoderDecoderCache):
        return grows
    return EncoderDecoderCache(grows, cache.cross_attention_cache)


def is_users_cache(cache: Any) -> bool:
    """Whether the caller of `generate` passed this cache, and so sees it afterwards."""
    return bool(getattr(cache, "_is_user_defined", False))

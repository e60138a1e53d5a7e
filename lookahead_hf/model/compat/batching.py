"""The objects of transformers' continuous batching that our queue takes and returns."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.requests import (
    GenerationOutput,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from lookahead_hf.model.compat.forwards import text_config

__all__ = [
    "GenerationOutput",
    "RequestState",
    "RequestStatus",
    "WorkloadHints",
    "bytes_per_token",
]


def bytes_per_token(model: Any) -> int:
    """Return the bytes that K and V of a token take at most, from the configuration of a model."""
    config = text_config(model)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    return int(2 * config.num_hidden_layers * kv_heads * dim * model.dtype.itemsize)

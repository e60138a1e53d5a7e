"""Reads, empties and refills the layers of transformers' caches, by layer type."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf.model import compat

Content = tuple[torch.Tensor, ...]
"""K and V by column, and the keys of an indexer, [rows, heads, columns, head_dim] each."""


SERVED = (
    *(compat.DynamicLayer, compat.DynamicSlidingWindowLayer),
    *(compat.StaticLayer, compat.StaticSlidingWindowLayer),
    *(*compat.HYBRID_LAYERS, *compat.INDEXED_LAYERS),
)
"""Layer types that can be taken over; a subclass may do anything."""


def unserved_layer(cache: compat.Cache) -> str | None:
    """Return the first layer type that cannot be taken over, None if all can."""
    if cache.offloading:
        return "offloaded cache"
    windowed = (each for each in cache.layers if isinstance(each, compat.DynamicSlidingWindowLayer))
    if any(layer.record_past for layer in windowed):
        return "a window whose past is recorded"  # all of which the caller may crop
    kinds = [type(layer) for layer in cache.layers]
    if cache.layer_class_to_replicate is not None:
        kinds.append(cache.layer_class_to_replicate)
    served = {*SERVED, compat.StateLayer, compat.EmptyLayer}
    return next((kind.__name__ for kind in kinds if kind not in served), None)


def most_columns(layer: Any) -> int | None:
    """Return the most columns that a layer of a served type holds, None for all."""
    if isinstance(layer, compat.DynamicSlidingWindowLayer):
        return int(layer.sliding_window) - 1
    return int(layer.max_cache_len) if type(layer) is compat.StaticSlidingWindowLayer else None


def window(layer: Any) -> int | None:
    """Return how many earlier columns the next token sees of a layer, None for all."""
    if type(layer) is compat.StaticSlidingWindowLayer:
        return int(layer.max_cache_len) - 1
    return most_columns(layer)


def capacity(cache: compat.Cache, sliding: int | None) -> int | None:
    """Return the number of columns that a cache has room for, None for any number.

    A static sliding layer with less room than the model's window, `sliding`, fills up.
    """
    ends = [
        layer.max_cache_len
        for layer in cache.layers
        if type(layer) is compat.StaticLayer
        or (type(layer) is compat.StaticSlidingWindowLayer and layer.max_cache_len < (sliding or 0))
    ]
    return min(ends, default=None)


def read(layer: Any) -> Content | None:
    """Return the content of the columns that a layer holds, as views if possible, or None."""
    if not getattr(layer, "is_initialized", False) or layer.keys is None:
        return None
    content: Content = (layer.keys, layer.values)
    if getattr(layer, "is_indexer_initialized", False):
        content += (layer.indexer_keys[:, None],)
    if not isinstance(layer, compat.StaticLayer):
        return content
    seen = slice(0, min(int(layer.get_seq_length()), layer.max_cache_len))
    return tuple(states[:, :, seen] for states in content)


def release(layer: Any, users: bool) -> None:
    """Empty a layer until `fill`; a caller's static one keeps its tensors' addresses."""
    if not (users and isinstance(layer, compat.StaticLayer)):
        layer.keys = layer.values = None
        if isinstance(layer, compat.INDEXED_LAYERS) and not isinstance(layer, compat.StaticLayer):
            layer.indexer_keys = None


def fill(layer: Any, content: Content, num_columns: int) -> None:
    """Store the newest columns that a layer holds after `num_columns`, in tensors that it has."""
    if isinstance(layer, compat.StaticLayer):
        _fill_static(layer, content, num_columns)
        return
    layer.keys, layer.values = content[:2]
    if len(content) > 2:
        layer.indexer_keys = content[2][:, 0]
    if isinstance(layer, compat.DynamicSlidingWindowLayer):
        layer.cumulative_length = num_columns


def _fill_static(layer: Any, content: Content, num_columns: int) -> None:
    held = content[0].shape[2]
    for name, states in zip(("keys", "values"), content, strict=False):
        store = getattr(layer, name)
        if store is None:
            shape = (*states.shape[:2], layer.max_cache_len, states.shape[3])
            store = states.new_zeros(shape)
            setattr(layer, name, store)
        store[:, :, :held].copy_(states)
    layer.cumulative_length.fill_(held)
    for states in content[2:]:
        layer.indexer_keys[:, :held].copy_(states[:, 0])
        layer.indexer_cumulative_length.fill_(held)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = num_columns

"""Caches of our own that hold numbers."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotCache, SlotGroup


def cache_of(window: int | None, lengths: list[int]) -> SlotCache:
    """A cache of one layer in which token t of a row is the number t."""
    cache = SlotCache(len(lengths))
    cache.groups["only"] = SlotGroup(cache.extent, window)
    store = torch.zeros(len(lengths), 4, 1, 2)
    cache.add("only", store, store.clone())
    for token in range(max(lengths)):
        feed(cache, [token] * len(lengths), [token < length for length in lengths])
    return cache


def feed(cache: SlotCache, tokens: list[int], keeps: list[bool]) -> None:
    cache.place(1)
    states = torch.tensor(tokens, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 1, 2)
    cache.layers[0].update(states, states)
    cache.lengths += np.array(keeps)

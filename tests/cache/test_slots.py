"""Slots: windows drop what nobody sees, and the cache takes little more memory than plain's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.model import compat
from tests.helpers.caches import CACHE
from tests.helpers.models import prompt, tiny
from tests.helpers.slots import cache_of, feed


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", [[100, 100], [100, 31], [5, 90]])
def test_the_newest_tokens_of_every_row_stand_in_order(
    window: int | None, lengths: list[int]
) -> None:
    cache = cache_of(window, lengths)
    (group,) = cache.each_group()
    for row, length in enumerate(lengths):
        held = group.layers[0].k_store[row, : group.lengths[row], 0, 0].tolist()
        assert held == list(range(int(group.dropped[row]), length))
        assert len(held) >= min(length, window or length)
    if window is not None:
        assert group.capacity < 40


def test_a_row_that_may_be_handed_back_keeps_what_the_slowest_sees() -> None:
    cache = cache_of(7, [10, 10])
    cache.extent.starts = cache.lengths.copy()
    for token in range(10, 60):
        feed(cache, [token, token], [True, token < 20])
    (group,) = cache.each_group()
    assert group.dropped[0] <= 20 - 7 and group.dropped[1] <= 20 - 7


def test_a_row_without_a_block_may_fill_its_room() -> None:
    cache = cache_of(None, [4, 2])
    (group,) = cache.each_group()
    assert group.capacity == 4
    store = group.layers[0].k_store
    store[1, 3] = 9.0
    cache.compact(np.array([[0], [1]]), np.array([1, 1]))
    assert store[0, :, 0, 0].tolist() == [0, 1, 2, 3]
    assert store[1, :3, 0, 0].tolist() == [0, 1, 9]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_memory_stays_near_plains_from_2048_tokens_on(name: str) -> None:
    """With a window of 512, as small models have it, and drafts of up to 16 nodes."""
    own = {} if name == "llama" else {"sliding_window": 512}
    model = tiny(name, max_position_embeddings=4096, **own)
    ids = prompt(1, 2048)
    with torch.no_grad():
        plain, taken = (
            model(ids, **{CACHE: DynamicCache(config=model.config)})[CACHE] for _ in range(2)
        )
    adopted = AdoptedCache(taken, None, 1, compat.layer_masks(model))
    num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    per_column = num_bytes / sum(layer.keys.shape[2] for layer in plain.layers)
    windows = [getattr(layer, "sliding_window", None) for layer in plain.layers]
    worst = 0.0
    for length in range(2048, 4000, 9):
        adopted.slots.lengths[:] = length
        adopted.slots.place(17)
        ours = sum(store.nbytes for group in adopted.slots.each_group() for store in group.stores)
        columns = [length if window is None else window - 1 for window in windows]
        worst = max(worst, ours / (per_column * sum(columns)))
    assert 1.0 <= worst <= 1.1

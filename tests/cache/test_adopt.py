"""Taking over and handing back the content of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from lookahead_hf.cache import adopt
from lookahead_hf.cache.adopt import AdoptedCache
from tests.helpers.models import tiny


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_many_rows_take_no_more_operations_than_few(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device each of them is a launch: 64 rows of 32 layers were 0.3 s of the host."""
    rows, columns, config = 64, 40, tiny(name).config
    counts = np.random.default_rng(3).integers(4, columns, rows)
    attended = np.arange(columns) >= columns - counts[:, None]
    content = torch.randn(2, rows, 2, columns, 16)
    found, taken, computed, columns_of = [], [], [], AdoptedCache.columns_of

    def noted(cache: AdoptedCache, *of: np.ndarray) -> np.ndarray:
        computed.append(of)
        return columns_of(cache, *of)

    monkeypatch.setattr(AdoptedCache, "columns_of", noted)
    for most in (adopt.MOST_COPIES, rows):
        monkeypatch.setattr(adopt, "MOST_COPIES", most)
        cache, ops = DynamicCache(config=config), Operations()
        for layer in range(config.num_hidden_layers):
            cache.update(*content, layer)
        masks = getattr(config, "layer_types", None) or [""]
        with ops:
            ours = AdoptedCache(cache, attended, rows, masks)
            stores = [store.clone() for group in ours.slots.each_group() for store in group.stores]
            back = ours.hand_back(columns)
        found.append([*stores, *(layer.keys for layer in back.layers)])
        taken.append(ops.count / len(stores))
        # Once for a group and a way, and not for each of its layers and for K and V.
        assert rows <= len(computed) <= 2 * rows * len(ours.slots.each_group())
        computed.clear()
    assert all(map(torch.equal, *found))
    assert taken[0] <= 40 < rows < taken[1]

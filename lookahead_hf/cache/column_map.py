"""Maps columns of plain's cache to slots."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.columns import ColumnCache


def seen_slots(cache: ColumnCache, row: int, kept: list[int]) -> list[list[torch.Tensor]]:
    """Return the slots that tokens of a row in the latest block see, by token and layer.

    `kept` are the places of these tokens in the block, root first; the cache's lengths count them
    already. Slots are in the order of the columns of plain's cache, -1 for pads.
    """
    assert isinstance(cache, AdoptedCache)
    length = int(cache.slots.lengths[row]) - len(kept)  # where the block begins
    prompt, first = np.arange(cache.num_columns), cache.num_columns - int(cache.pads[row])
    if cache.columns is not None:
        prompt = np.full(cache.num_columns, -1)
        prompt[cache.columns[row, :first]] = np.arange(first)
    tokens = np.concatenate([prompt, np.arange(first, length), length + np.array(kept)])
    before = len(tokens) - len(kept)
    views = [(window, int(gone[row])) for window, gone in cache.views]
    out = []
    for end in range(before + 1, len(tokens) + 1):
        shown = {view: _slots(tokens[:end], *view) for view in set(views)}
        out.append([shown[view] for view in views])
    return out


def _slots(tokens: np.ndarray, window: int | None, dropped: int) -> torch.Tensor:
    """Return the slots of a row's tokens within a window, -1 for pads."""
    newest = tokens if window is None else tokens[-window - 1 :]
    return torch.from_numpy(np.where(newest < 0, -1, newest - dropped))

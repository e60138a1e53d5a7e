"""Maps the columns that plain's cache shows a token to the slots of our cache."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.cache.adopt import AdoptedCache
from lookahead_hf.cache.columns import ColumnCache


def seen_slots(cache: ColumnCache, row: int, kept: list[int]) -> list[list[torch.Tensor]]:
    """Return the slots that a row's tokens in the latest block see, each the parent of the next.

    `kept` are their places in the block, root first; the cache's lengths count them already. The
    slots come per token and layer, in the order of the columns that plain's cache shows, -1 for
    pads.
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
    """Return the slots of a row's newest tokens, -1 for pads, with so many dropped in front."""
    newest = tokens if window is None else tokens[-window - 1 :]
    return torch.from_numpy(np.where(newest < 0, -1, newest - dropped))

"""Attention masks of a block, with windows and chunks of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.draft import DraftTree


@dataclass(frozen=True, slots=True)
class MaskKind:
    """A kind of mask that the model takes, by transformers' name of the layer type."""

    name: str
    window: int | None = None  # columns, the token's own included
    chunk: int | None = None  # columns, counted from the row's first attended one

    @property
    def is_limited(self) -> bool:
        """Whether a token does not see all columns before its own."""
        return self.window is not None or self.chunk is not None

    def may_hide(self, last: int) -> bool:
        """Return whether a token up to the column `last` may not see all columns before it."""
        return self.chunk is not None or (self.window is not None and last >= self.window)

    def is_near(self, query: Any, key: Any, pads: Any) -> Any:
        """Return which columns a column sees, causality aside, of arrays or tensors that broadcast.

        Args:
            query: Columns of tokens.
            key: Columns that they may see.
            pads: Padded columns of each row. They hold nothing, so that a negative difference does
                not matter.
        """
        near = True if self.window is None else query - key < self.window
        if self.chunk is not None:
            near = near & ((query - pads) // self.chunk == (key - pads) // self.chunk)
        return near

    def within(self, kept: int | None) -> MaskKind:
        """Return this kind for a plain cache that keeps `kept` earlier columns, None for all."""
        if kept is None or self.window is not None:
            return self
        return replace(self, window=kept + 1)


def of_model(model: Any) -> list[MaskKind]:
    """Return the masks that the model's layers need."""
    config = compat.text_config(model)
    limits = {
        "full_attention": {},
        "indexed_attention": {},
        "sliding_attention": {"window": getattr(config, "sliding_window", None)},
        "chunked_attention": {"chunk": getattr(config, "attention_chunk_size", None)},
    }
    names = [name for name in compat.mask_kinds(model) if name in limits]
    return [MaskKind(name, **limits[name]) for name in names]


def ancestors(draft: DraftTree, row: int, width: int) -> np.ndarray:
    """Return which tokens of a row's block each token sees, its ancestors and itself.

    The result is [width, width] bool; index 0 is the last token, 1 + i node i, and others padding.
    """
    seen = np.eye(width, dtype=bool)
    parents = draft.parents[draft.row(row)] + 1
    for node, parent in enumerate(parents.tolist(), 1):
        seen[node] |= seen[parent]
    return seen


def additive(
    kind: MaskKind,
    seen: np.ndarray,  # [rows, width, width] bool
    lengths: np.ndarray,  # [rows]
    visible: int,
    columns: tuple[np.ndarray, np.ndarray] | None,
    pads: np.ndarray,  # [rows]
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return `[rows, 1, width, visible]`: 0 for seen slots and the lowest number elsewhere.

    Every backend takes this form; a bool mask would be converted again in every layer.

    Args:
        kind: The kind of mask.
        seen: Which tokens of the block each token sees.
        lengths: Kept tokens of every row; its block is in the slots behind them.
        visible: Slots that the attention reads.
        columns: Columns of the block's tokens, [rows, width], and of the slots, [rows, visible];
            needed for windows and chunks.
        pads: Padded columns of each row.
    """
    rows, width = seen.shape[:2]
    mask = np.zeros((rows, width, visible), bool)
    for row, length in enumerate(lengths.tolist()):
        mask[row, :, :length] = True
        mask[row, :, length : length + width] = seen[row, :, : visible - length]
    if columns is not None:
        query, key = columns[0][:, :, None], columns[1][:, None, :]
        mask &= kind.is_near(query, key, pads[:, None, None])
    hidden = torch.from_numpy(~mask)[:, None].to(device)
    out = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return out.masked_fill_(hidden, torch.finfo(dtype).min)

"""Masks of one forward, those that are only made if somebody reads them included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lookahead_hf.model import compat

_OF_SHAPE = frozenset(
    {
        torch.Tensor.dim,
        torch.Tensor.size,
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "is_cuda", "ndim", "requires_grad", "shape")
        ),
    }
)
"""Properties that are read without building the mask."""


class LazyMask(torch.Tensor):
    """A mask that is built when a function of torch first reads it.

    Attributes:
        made: The mask, None before that.
    """

    _make: Callable[[], torch.Tensor]
    made: torch.Tensor | None

    @staticmethod
    def of(
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LazyMask:
        """Return a mask of this shape that `make` builds."""
        mask = compat.wrapper_tensor(LazyMask, shape, dtype, device)
        mask._make, mask.made = make, None
        return mask

    def _read(self) -> torch.Tensor:
        if self.made is None:
            self.made = self._make()
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = compat.map_only(LazyMask, LazyMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = compat.map_only(LazyMask, LazyMask._read, (args, kwargs or {}))
        return func(*args, **kwargs)


def made(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as layers read it, None for a lazy one that nothing has read."""
    return mask.made if isinstance(mask, LazyMask) else mask


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
        """Return which columns `query` sees of the columns `key`, causality aside.

        All are arrays or tensors that broadcast. `pads` counts the columns of the prompt that a row
        does not attend; those before the first attended one hold nothing.
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


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return which tokens of its block each token sees: its ancestors and itself.

    Args:
        parents: Index of each token's parent in its block, -1 for none, [rows, width].

    Returns:
        [rows, width, width] bool.
    """
    width = parents.shape[1]
    row, own = np.arange(len(parents))[:, None], np.arange(width)
    above = np.where(parents < 0, own, parents)
    seen = np.tile(np.eye(width, dtype=bool), (len(parents), 1, 1))
    for _ in range((width - 1).bit_length()):  # each round doubles the distance
        seen = seen | seen[row, above]
        above = above[row, above]
    return seen


def additive(
    kind: MaskKind,
    seen: torch.Tensor,  # [rows, width, width] bool
    lengths: torch.Tensor,  # [rows]
    visible: int,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    pads: torch.Tensor,  # [rows]
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `[rows, 1, width, visible]`: 0 for seen slots and the lowest number elsewhere.

    Every backend takes this form; a bool mask would be converted again in every layer.

    Args:
        kind: The kind of mask.
        seen: Which tokens of the block each token sees.
        lengths: Kept tokens of every row; its block is in the slots behind them.
        visible: Slots that the attention reads, at least as many as the longest row has tokens.
        columns: Column of every block token, [rows, width], and of every slot before the block,
            [rows, visible or more]; needed where the kind has a window or chunks.
        pads: Columns of the prompt that the row does not attend.
        dtype: That of the mask.
    """
    width = seen.shape[1]
    slots = torch.arange(visible + width, device=seen.device)  # a row may end behind the visible
    block = lengths[:, None] + slots[:width]
    shown = (slots < lengths[:, None])[:, None].repeat(1, width, 1)
    shown = shown.scatter_(2, block[:, None].expand_as(seen), seen)[..., :visible]
    if columns is not None:
        query, key = columns
        key = torch.cat([key[:, :visible], query], 1).scatter_(1, block, query)[:, :visible]
        shown = shown & kind.is_near(query[:, :, None], key[:, None], pads[:, None, None])
    return compat.additive_mask(shown, dtype)

"""Overrides positions that a decoder derives from its cache's length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lookahead_hf.block.block import Block, Columns
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.runner.forward import current
from lookahead_hf.runner.install import SetOwn


def install(model: nn.Module, give: SetOwn) -> None:
    """Have a model that counts positions itself use our columns in our forwards."""
    if not facts_of(model).needs_columns:
        return
    for table in compat.counted_tables(model):
        give(table, "forward", _looked_up(table))
    for module in compat.decoder_of(model).modules():
        if compat.has_relative_bias(module):
            give(module, "compute_bias", _by_column(module.compute_bias))
        for name, made in ((compat.BLOOM_ALIBI, _by_order), (compat.MPT_ALIBI, _by_distance)):
            if hasattr(module, name):
                give(module, name, made(getattr(module, name)))
        if compat.is_windowed_by_slot(module):
            give(module, "bias", _window(module, module.config.window_size))


def _columns() -> Columns | None:
    """Return the columns of the forward in progress, if it is ours."""
    context = current()
    block = None if context is None else context.block
    return block.columns if isinstance(block, Block) else None


def _looked_up(table: Any) -> Callable[..., torch.Tensor]:
    """Return a `forward` for a table that differs from its own within our forwards only."""
    original = table.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the block's entries, [rows, width, dim]; token ids are the first argument."""
        columns = _columns()
        if columns is None:
            return original(*args, **kwargs)
        if compat.is_computed(table):
            return compat.entries_of_columns(table, columns[0].to(args[0].device), args[0])
        # By the table's own lookup: offloaded weights are present only while it runs.
        entries = original(*args, **{**kwargs, "position_ids": columns[0]})
        return entries.reshape(*columns[0].shape, -1)

    return forward


def _by_column(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a `compute_bias` that differs from `original` within our forwards only."""

    def compute_bias(query_length: int, key_length: int, **kwargs: Any) -> torch.Tensor:
        """Return the bias of every block token and slot, [rows, heads, width, slots]."""
        columns = _columns()
        if columns is None:
            return original(query_length, key_length, **kwargs)
        farthest = int(columns.query.max())
        kwargs["past_seen_tokens"] = farthest
        by_distance = original(1, farthest + 1, **kwargs)[0, :, 0].flip(-1)  # [heads, distances]
        return by_distance[:, columns.distance].transpose(0, 1)

    return compute_bias


def _by_order(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a `build_alibi_tensor` that differs from `original` within our forwards only."""

    def build_alibi_tensor(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias of every slot, [rows * heads, 1, slots]."""
        columns = _columns()
        if columns is None:
            return original(mask, num_heads, dtype)
        attended = torch.ones_like(columns.order[:1, :1]).expand(1, int(columns.order.max()) + 1)
        biases = original(attended, num_heads, dtype)[:, 0]  # [heads, tokens]
        return biases[:, columns.order].transpose(0, 1).flatten(0, 1)[:, None]

    return build_alibi_tensor


class _Cut:
    """A tensor that a model slices to the length of its cache.

    In our forwards, the slice follows from the columns of tokens and slots.
    """

    def __init__(
        self,
        original: Callable[[], torch.Tensor],
        by_columns: Callable[[torch.Tensor, Columns], torch.Tensor],
    ) -> None:
        self._original, self._by_columns = original, by_columns

    def __getitem__(self, index: Any) -> torch.Tensor:
        columns = _columns()
        original = self._original()
        return original[index] if columns is None else self._by_columns(original, columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original(), name)


def _by_distance(original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Wrap a method that returns biases, [heads, 1, length]; that of distance d is at -1 - d."""

    def at(bias: torch.Tensor, columns: Columns) -> torch.Tensor:
        """Return the bias of every token and slot, [rows, heads, width, slots]."""
        length = bias.shape[2]
        return bias[:, 0][:, length - 1 - columns.distance.clamp(max=length - 1)].transpose(0, 1)

    def build(*args: Any, **kwargs: Any) -> Any:
        bias = original(*args, **kwargs)
        return _Cut(lambda: bias, at)

    return build


def _window(module: Any, window: int) -> _Cut:
    """Return the causal matrix of an attention with a window of `window` columns."""

    def near(_: torch.Tensor, columns: Columns) -> torch.Tensor:
        """Return which slots each token may see, causality aside, [rows, 1, width, slots]."""
        return columns.distance[:, None] < window

    return _Cut(lambda: compat.buffer(module, "bias"), near)

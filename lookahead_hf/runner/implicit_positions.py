"""Replaces the positions that a decoder counts from its cache's length by those of our columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lookahead_hf import compat
from lookahead_hf.model_state import state_of
from lookahead_hf.runner.shared_change import SharedChange, set_own

Columns = tuple[torch.Tensor, torch.Tensor]
"""Column of every token of a block, [rows, width], and of every slot it sees, [rows, slots]."""

_step = threading.local()


@contextmanager
def step(columns: Columns | None) -> Iterator[None]:
    """Set the columns of the tokens in this thread's forward; None for a model given positions."""
    outer = getattr(_step, "columns", None)
    _step.columns = columns
    try:
        yield
    finally:
        _step.columns = outer


def laid_under(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a model that counts positions itself uses our columns.

    All other forwards, such as those of other threads meanwhile, count as before.
    """
    if not compat.counts_positions(model):
        return nullcontext()
    state = state_of(model)
    undo = state.undo_positions

    def put() -> None:
        if undo:
            return
        for table in compat.counted_tables(model):
            set_own(table, "forward", _looked_up(table), undo)
        for module in compat.relative_biases(model):
            set_own(module, "compute_bias", _by_column(module.compute_bias), undo)

    def take_out() -> None:
        while undo:
            undo[-1]()
            undo.pop()

    return SharedChange(state.position_users, put, take_out)


def _looked_up(table: Any) -> Callable[..., torch.Tensor]:
    """A `forward` for a table that differs from its own within our forwards only."""
    original = table.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the block's entries, [rows, width, dim]; token ids are the first argument."""
        columns: Columns | None = getattr(_step, "columns", None)
        if columns is None:
            return original(*args, **kwargs)
        if compat.grows(table):
            return compat.entries_of_columns(table, columns[0].to(args[0].device), args[0])
        # By the table's own lookup, as offloaded weights are present only while it runs.
        entries = original(*args, **{**kwargs, "position_ids": columns[0]})
        return entries.reshape(*columns[0].shape, -1)

    return forward


def _by_column(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `compute_bias` that differs from `original` within our forwards only."""

    def compute_bias(query_length: int, key_length: int, **kwargs: Any) -> torch.Tensor:
        """Return the bias of every block token and slot, [rows, heads, width, slots]."""
        columns: Columns | None = getattr(_step, "columns", None)
        if columns is None:
            return original(query_length, key_length, **kwargs)
        query, key = columns
        farthest = int(query.max())
        kwargs["past_seen_tokens"] = farthest
        by_distance = original(1, farthest + 1, **kwargs)[0, :, 0].flip(-1)  # [heads, distances]
        distance = (query[:, :, None] - key[:, None, :]).clamp(0, farthest)
        return by_distance[:, distance].transpose(0, 1)

    return compute_bias

"""Positions that a decoder counts itself, from the length of its cache: by our columns instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lookahead_hf import compat

Columns = tuple[torch.Tensor, torch.Tensor]
"""Column of every token of a block, [rows, width], and of every slot it sees, [rows, slots]."""

_step = threading.local()
_lock = threading.Lock()
_users: WeakKeyDictionary[nn.Module, tuple[int, list[Callable[[], None]]]] = WeakKeyDictionary()


@contextmanager
def step(columns: Columns | None) -> Iterator[None]:
    """Mark the forward in progress, on this thread, as one of tokens that stand in these columns.

    None for a model that is told its positions.
    """
    outer = getattr(_step, "columns", None)
    _step.columns = columns
    try:
        yield
    finally:
        _step.columns = outer


@contextmanager
def laid_under(model: nn.Module) -> Iterator[None]:
    """Let a model that counts positions itself ask us, for the length of a call.

    Forwards that are not ours, also those of other threads meanwhile, count as before.
    """
    if not compat.counts_positions(model):
        yield
        return
    with _lock:
        count, undo = _users.get(model, (0, []))
        _users[model] = count + 1, undo or _lay(model)
    try:
        yield
    finally:
        with _lock:
            count, undo = _users.pop(model)
            if count > 1:
                _users[model] = count - 1, undo
            else:
                for each in undo:
                    each()


def _lay(model: nn.Module) -> list[Callable[[], None]]:
    """Put our answers in, and return what takes them out again."""
    undo: list[Callable[[], None]] = []
    for table in compat.counted_tables(model):
        undo.append(_put(table, "forward", _looked_up(table)))
    for module in compat.relative_biases(model):
        undo.append(_put(module, "compute_bias", _by_column(module.compute_bias)))
    return undo


def _put(module: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Give one module object a method of its own, and return what takes it away again."""
    own = vars(module)
    found = own.get(name)
    own[name] = function

    def undo() -> None:
        if found is None:
            own.pop(name, None)
        else:
            own[name] = found

    return undo


def _looked_up(table: Any) -> Callable[..., torch.Tensor]:
    """A table's `forward` that is its own in all forwards but ours."""
    original = table.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        """The entries for the block, whose token ids come first, [rows, width, dim]."""
        columns: Columns | None = getattr(_step, "columns", None)
        if columns is None:
            return original(*args, **kwargs)
        if compat.grows(table):
            return compat.entries_of_columns(table, columns[0].to(args[0].device), args[0])
        # By its own lookup, since offloaded weights are there while it runs and at no other time.
        entries = original(*args, **{**kwargs, "position_ids": columns[0]})
        return entries.reshape(*columns[0].shape, -1)

    return forward


def _by_column(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `compute_bias` that is `original` in all forwards but ours."""

    def compute_bias(query_length: int, key_length: int, **kwargs: Any) -> torch.Tensor:
        """Bias of every token of the block and every slot, [rows, heads, width, slots]."""
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

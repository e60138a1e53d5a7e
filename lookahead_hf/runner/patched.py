"""Makes all changes to a model in one context, and gives its decoder positions by them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lookahead_hf.block.block import Block
from lookahead_hf.call import optional
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.model.state import state_of
from lookahead_hf.runner import attention
from lookahead_hf.runner.forward import SetOwn, current, set_own, shared_change


def patched(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which our forwards of a model follow their `ForwardContext`.

    All other forwards, such as those of other threads meanwhile, are the model's own. What was
    given to `torch.compile` runs uncompiled.
    """
    state = state_of(model)
    undo, configs = state.patches, attention.configs_of(model)

    def put() -> None:
        attention.install(model, configs)
        if not undo:
            _remove_compiled(model, undo)
            give = partial(set_own, undo)
            _install_positions(model, give)
            if facts_of(model).mixers:
                optional.load("recurrent states").install(model, give)

    def remove() -> None:
        attention.remove(configs)
        while undo:
            undo[-1]()
            undo.pop()

    return shared_change(state.patch_users, put, remove)


def _remove_compiled(model: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Have a model run what `torch.compile` was given, and add to `undo` what reverts it.

    Compiled code is specialised to shapes, and those of drafts differ from step to step.
    """
    for module in model.modules():
        own = vars(module)
        for name in (compat.CALL, "forward"):
            compiled = own.get(name)
            given = compat.compiled_from(compiled)
            if given is None:
                continue
            undo.append(partial(own.__setitem__, name, compiled))  # first, for interrupts
            del own[name]
            if name == "forward" and module.forward != given:
                own[name] = given


def _install_positions(model: nn.Module, give: SetOwn) -> None:
    """Have a model that counts positions itself use our columns in our forwards."""
    if not facts_of(model).needs_columns:
        return
    for table in compat.counted_tables(model):
        give(table, "forward", _looked_up(table))
    for module in compat.decoder_of(model).modules():
        if compat.has_relative_bias(module):
            give(module, "compute_bias", _by_column(module.compute_bias))


def _block() -> Block | None:
    """Return the block of the forward in progress, if it is ours and its columns are known."""
    context = current()
    block = None if context is None else context.block
    return block if isinstance(block, Block) and block.slot_columns is not None else None


def _looked_up(table: Any) -> Callable[..., torch.Tensor]:
    """Return a `forward` for a table that differs from its own within our forwards only."""
    original = table.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the block's entries, [rows, width, dim]; token ids are the first argument."""
        block = _block()
        if block is None:
            return original(*args, **kwargs)
        if compat.is_computed(table):
            return compat.entries_of_columns(table, block.query.to(args[0].device), args[0])
        # By the table's own lookup: offloaded weights are present only while it runs.
        entries = original(*args, **{**kwargs, "position_ids": block.query})
        return entries.reshape(*block.query.shape, -1)

    return forward


def _by_column(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a `compute_bias` that differs from `original` within our forwards only."""

    def compute_bias(query_length: int, key_length: int, **kwargs: Any) -> torch.Tensor:
        """Return the bias of every block token and slot, [rows, heads, width, slots]."""
        block = _block()
        if block is None:
            return original(query_length, key_length, **kwargs)
        farthest = int(block.query.max())
        kwargs["past_seen_tokens"] = farthest
        by_distance = original(1, farthest + 1, **kwargs)[0, :, 0].flip(-1)  # [heads, distances]
        return by_distance[:, block.distance].transpose(0, 1)

    return compute_bias

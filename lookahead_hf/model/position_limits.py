"""Limits of a call's positions: learned tables end, and some rotary frequencies change."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf import compat
from lookahead_hf.fallback import FallbackReason, Unserved


def of_prompt(
    model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the position ids of the decoder's prompt, [..., rows, columns], None without them."""
    name = compat.decoder_names(model).positions
    columns = compat.num_columns(model, input_ids, model_kwargs)
    if name is None:
        return torch.arange(columns, device=input_ids.device)[None]
    if model_kwargs.get(name) is None:
        return None
    given = compat.prepared_positions(model, name, input_ids, model_kwargs)
    if given is None:
        mask = model_kwargs.get(compat.decoder_names(model).mask)
        if mask is not None:
            columns = mask.shape[1]  # the caller's cache included
        given = torch.arange(columns, device=input_ids.device)[None]
    return given


def check_length(model: Any, position_ids: torch.Tensor, num_columns: int, num_new: int) -> None:
    """Raise Unserved if the call crosses a length at which the model's frequencies change.

    Such a model computes the frequencies of a forward from its longest position, so that a draft
    beyond the length would alter the tokens before it. Positions, [..., rows, columns], and columns
    are those of the prompt; of `num_new` tokens the last one is never fed.
    """
    limits = compat.rope_limits(model)
    if not limits or not position_ids.numel():  # the forward says what is wrong with the prompt
        return
    newest = position_ids[..., -1]
    shortest = min(int(newest.min()) + 1, num_columns)
    longest = max(int(newest.max()) + 1, num_columns) + num_new - 1
    for rope_type, limit in limits.items():
        # Long factors hold for every forward that has one position beyond the limit.
        stays_long = rope_type == "longrope" and shortest > limit
        if longest > limit and not stays_long:
            raise Unserved(
                FallbackReason.MODEL,
                f"its {rope_type!r} positions change beyond {limit} tokens",
                f"keep the prompt and max_new_tokens together within {limit} tokens",
            )


def num_draftable(model: Any, position_ids: torch.Tensor, num_new: int) -> int:
    """Return how many of `num_new` tokens drafts may cover before a table of positions ends.

    Plain generation feeds every row one token per step, so no row needs more than the longest has
    room for. A text that goes on beyond the table fails as it does in plain generation.

    `position_ids` are those of the prompt, [..., rows, columns].
    """
    table = compat.position_table(model)
    if table is None or not position_ids.numel():
        return num_new
    newest = int(position_ids[..., -1].max())
    return num_new if newest >= table else min(num_new, table - newest)


def room(model: Any) -> int | None:
    """Return the most tokens before the model's positions end or change, None without a limit."""
    ends = [*compat.rope_limits(model).values(), compat.position_table(model)]
    return min((end for end in ends if end is not None), default=None)

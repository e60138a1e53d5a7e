"""Arguments that plain `generate` passes with every forward beside those that a step sets anew."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf import compat


def passed_on(model_kwargs: dict[str, Any], names: compat.DecoderNames) -> dict[str, Any]:
    """What a step passes on of what `generate` prepared.

    Args:
        model_kwargs: As prepared by `generate`.
        names: What the model calls the inputs that every step sets anew.
    """
    ours = names.prepared | compat.PROMPT_ONLY
    return {
        name: _last_types(name, value) if name in compat.TOKEN_TYPES else value
        for name, value in model_kwargs.items()
        if name not in ours and value is not None
    }


def _last_types(name: str, types: torch.Tensor) -> torch.Tensor:
    """Type of every further token, [rows, 1], after those of the prompt, [rows, columns]."""
    last = types[:, -1:]
    return last if name == "token_type_ids" else torch.zeros_like(last)


def widened(passed: dict[str, Any], width: int) -> dict[str, Any]:
    """What `passed_on` returned, for a forward of so many tokens per row."""
    types = {name: passed[name] for name in compat.TOKEN_TYPES if name in passed}
    return {**passed, **{name: value.expand(-1, width) for name, value in types.items()}}

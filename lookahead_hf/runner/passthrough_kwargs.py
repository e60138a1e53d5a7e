"""Arguments that plain `generate` passes to every forward, except those that a step sets."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf import compat


def passed_on(model_kwargs: dict[str, Any], names: compat.DecoderNames) -> dict[str, Any]:
    """Return the prepared arguments that every step passes on; steps set those in `names`."""
    ours = names.prepared | compat.PROMPT_ONLY
    passed = {k: v for k, v in model_kwargs.items() if k not in ours and v is not None}
    for name in passed.keys() & set(compat.TOKEN_TYPES):  # of every token behind the prompt
        last = passed[name][:, -1:]
        passed[name] = torch.zeros_like(last) if name == "mm_token_type_ids" else last
    return passed


def widened(passed: dict[str, Any], width: int) -> dict[str, Any]:
    """Widen the arguments of `passed_on` to `width` tokens per row."""
    types = {name: passed[name] for name in compat.TOKEN_TYPES if name in passed}
    wide = {name: t.expand(-1, width, *t.shape[2:]) for name, t in types.items()}
    return {**passed, **wide}

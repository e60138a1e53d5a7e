"""Plain generation's forwards of single tokens, which self tests compare with."""

from __future__ import annotations

from typing import Any

import torch

from lookahead_hf import compat


def plain_by_steps(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, num_prompt: int
) -> torch.Tensor:
    """Return the logits of plain generation behind a prompt, [rows, tokens, vocab].

    The inputs of each step are prepared as in `generate`, which a class may override.

    Args:
        model: The model.
        ids: The text, [rows, columns].
        mask: Its mask, of the same shape.
        num_prompt: Columns of the prompt, which one forward reads.
    """
    given: dict[str, Any] = {"use_cache": True, "attention_mask": mask[:, :num_prompt]}
    names = compat.decoder_names(model)
    given[names.cache] = compat.DynamicCache(config=model.config)
    if not compat.counts_positions(model):
        given["position_ids"] = compat.positions_by_mask(mask[:, :num_prompt])
    logits = []
    for count in range(num_prompt, ids.shape[1] + 1):
        outputs, given = compat.plain_step(model, ids[:, :count], count == num_prompt, given)
        logits.append(outputs.logits[:, -1:].float())
    return torch.cat(logits[1:], 1)

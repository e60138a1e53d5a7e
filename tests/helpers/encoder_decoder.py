"""Calls of encoder-decoder models."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.models import prompt

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


def texts(rows: int) -> dict[str, torch.Tensor]:
    """Texts for the encoder, of several lengths."""
    ids = prompt(rows, 14, seed=4)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, -4 * row :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def call(rows: int, **settings: Any) -> dict[str, Any]:
    return {**texts(rows), "max_new_tokens": 30, "pad_token_id": 0, **settings}


def picture_call(rows: int, **settings: Any) -> dict[str, Any]:
    pictures = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pictures, "max_new_tokens": 30, "pad_token_id": 0, **settings}

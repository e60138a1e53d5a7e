"""What a call begins with: the rows of its prompt, and what their encoder has read."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.rows import Rows

EncoderInputs = tuple[torch.Tensor, torch.Tensor | None]
"""What each row's encoder was given, [rows, ...], and its mask, [rows, columns]."""


def of_encoder(
    texts: torch.Tensor | None,  # [texts, ...]
    num_rows: int,
    mask: torch.Tensor | None,
) -> EncoderInputs | None:
    """What each row's encoder was given; several rows may share one text. None without encoder."""
    return None if texts is None else (texts.repeat_interleave(num_rows // len(texts), 0), mask)


def rows_of(
    input_ids: torch.Tensor,  # [rows, columns]
    mask: torch.Tensor | None,  # [rows, columns]
    encoder: EncoderInputs | None,
) -> Rows:
    """The rows of a call, as they are before its first token."""
    ids, encoder_ids = input_ids.to("cpu").numpy(), _encoder_ids(encoder)
    if mask is None or not ids.shape[1]:
        return Rows(ids, None, encoder_ids)
    attended = mask[:, -ids.shape[1] :].to("cpu").numpy().astype(bool)
    return Rows(ids, attended, encoder_ids)


def _encoder_ids(encoder: EncoderInputs | None) -> list[np.ndarray] | None:
    """Token ids that each row's encoder has read, without pads; None where it read none."""
    inputs, mask = encoder or (None, None)
    if inputs is None or inputs.dim() != 2 or inputs.is_floating_point():
        return None
    ids = inputs.to("cpu").numpy()
    if mask is None or mask.dim() != 2:
        return list(ids)
    read = mask.to("cpu").numpy().astype(bool)
    return [ids[row][read[row]] for row in range(len(ids))]

"""The prompts of a batch, read without the padding between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache import hf_layers


def attended_columns(
    mask: torch.Tensor | None,  # [rows, columns]
    num_virtual: int,
) -> np.ndarray | None:
    """Return which columns the rows attend, [rows, virtual + columns] bool, None for all.

    Args:
        mask: The attention mask that `generate` prepared.
        num_virtual: Columns before the prompt that every row attends.
    """
    if mask is None:
        return None
    attended = mask.to("cpu").numpy().astype(bool)
    return np.pad(attended, ((0, 0), (num_virtual, 0)), constant_values=True)


def may_leave_padding(
    attended: np.ndarray,  # [rows, columns] bool
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> bool:
    """Return whether prompts may be read in a flat block instead of a padded batch.

    The block fills a cache of our own, which holds nothing for pads, so the caller must not see the
    cache. No window may be shorter than the prompt: it would move while the prompt is read.
    """
    cache: Any = model_kwargs.get("past_key_values")
    if attended.all() or not attended[:, -1].all():
        return False  # plain generation goes on from a pad at the end of a row
    if generation_config.return_dict_in_generate or compat.is_users_cache(cache):
        return False
    if generation_config.prefill_chunk_size is not None or model_kwargs.get("output_hidden_states"):
        return False
    if any(model_kwargs.get(name) is not None for name in compat.PROMPT_ONLY):
        return False  # embeddings or pictures
    if type(cache) is not compat.DynamicCache or not cache.layers or cache.get_seq_length():
        return False
    windows = [hf_layers.window(layer) for layer in cache.layers]
    shares = getattr(compat.text_config(model), "num_kv_shared_layers", None)
    return not shares and all(each is None or each >= attended.shape[1] for each in windows)

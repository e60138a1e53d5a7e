"""The prompts of a batch, read without the padding between them where that saves much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lookahead_hf import compat
from lookahead_hf.cache import hf_layers

MOST_AT_ONCE = 2048
"""Most tokens of one forward, which bounds the memory for its hidden states and masks."""

LEAST_SAVED = 0.1
"""Share of padding from which leaving it out pays. Below, the prompts are read as plain does."""


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
    """Return whether flat blocks of a prompt give every row what its padded prompt gives it.

    They fill a cache of our own from the start, which has nothing in the columns of pads. So the
    caller must not see it. It must also hold the whole prompt, since a window would move on while
    the prompt is read.
    """
    cache: Any = model_kwargs.get("past_key_values")
    if attended.mean() > 1 - LEAST_SAVED or not attended[:, -1].all():
        return False  # where a row ends with a pad, plain goes on from that
    if generation_config.return_dict_in_generate or compat.is_users_cache(cache):
        return False
    if generation_config.prefill_chunk_size is not None or model_kwargs.get("output_hidden_states"):
        return False
    if any(model_kwargs.get(name) is not None for name in compat.PROMPT_ONLY):
        return False  # embeddings or pictures, which the tokens alone do not show
    if type(cache) is not compat.DynamicCache or not cache.layers or cache.get_seq_length():
        return False
    windows = [hf_layers.window(layer) for layer in cache.layers]
    shares = getattr(compat.text_config(model), "num_kv_shared_layers", None)
    return not shares and all(each is None or each >= attended.shape[1] for each in windows)


def read(
    tokens: Sequence[np.ndarray], run: Callable[[list[np.ndarray]], torch.Tensor]
) -> torch.Tensor:
    """Feed prompts in flat blocks of bounded size; return the logits after them, [rows, 1, vocab].

    Args:
        tokens: Attended tokens of every row, [tokens] int64 each; every row has some.
        run: Feeds pieces of the rows, [tokens] each, and returns logits after the last token of
            each, [rows, 1, vocab].
    """
    after: list[torch.Tensor | None] = [None] * len(tokens)
    for pieces in _blocks(tokens):
        logits = run(pieces)
        for row, piece in enumerate(pieces):
            if len(piece):
                after[row] = logits[row]
    return torch.stack([each for each in after if each is not None])


def _blocks(tokens: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Cut the rows, one after another, into blocks of `MOST_AT_ONCE` tokens."""
    ends = np.cumsum([len(each) for each in tokens])
    for first in range(0, int(ends[-1]), MOST_AT_ONCE):
        begins = first - (ends - [len(each) for each in tokens])
        yield [
            each[max(begin, 0) : max(begin + MOST_AT_ONCE, 0)]
            for each, begin in zip(tokens, begins.tolist(), strict=True)
        ]

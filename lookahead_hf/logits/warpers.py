"""Faster twins of transformers' processors for one row on a CPU, equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf


def twin(processor: Any) -> Any:
    """Return the faster twin of a processor, or the processor itself if it has none."""
    if type(processor) is hf.TopPLogitsWarper and processor.filter_value == -torch.inf:
        return TopP(processor)
    bans = banned(processor)
    return processor if bans is None else Ban(*bans)


def banned(processor: Any) -> tuple[torch.Tensor, Callable[[Any], Any]] | None:
    """Return what a processor bans, None if it does anything but ban tokens.

    Returns the token ids, and a function of the number of columns in the prefix, a number or an
    array, that says whether they are banned.
    """
    kind, p = type(processor), processor
    if kind is hf.MinLengthLogitsProcessor:
        return p.eos_token_id, lambda columns: columns < p.min_length
    if kind is hf.MinNewTokensLengthLogitsProcessor:
        first = p.prompt_length_to_skip + p.min_new_tokens
        return p.eos_token_id, lambda columns: columns < first
    if kind is hf.SuppressTokensLogitsProcessor:
        return p.suppress_tokens, lambda columns: columns >= 0
    if kind is hf.SuppressTokensAtBeginLogitsProcessor:
        return p.begin_suppress_tokens, lambda columns: columns == p.begin_index
    return None


class TopP:
    """Top-p that sorts the scores alone, in a quarter of the time for scores and indices.

    The sums are the original's own, so the same number of scores is removed. If the cut splits a
    tie, the original decides, since it breaks ties in its own order.
    """

    def __init__(self, original: hf.TopPLogitsWarper) -> None:
        self._original = original

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return what the original returns, [1, vocab] float32 on a CPU -> [1, vocab]."""
        values = np.sort(scores.numpy())
        cumulative = torch.from_numpy(values).softmax(-1).cumsum(-1)
        removed = int((cumulative <= 1 - self._original.top_p).sum())
        removed = min(removed, values.shape[1] - self._original.min_tokens_to_keep)
        if removed <= 0:
            return scores
        highest, lowest = values[0, removed - 1 : removed + 1].tolist()
        if highest == lowest:
            return self._original(ids, scores)
        return torch.nn.functional.threshold(scores, highest, -torch.inf)


class Ban:
    """Bans tokens at certain prefix lengths, without a search through the vocabulary.

    The originals spend 0.4 ms per token on that search, even once they no longer ban anything.
    """

    def __init__(self, token_ids: torch.Tensor, applies: Callable[[int], bool]) -> None:
        """`applies` says whether the tokens are banned after a prefix of a number of columns."""
        self._token_ids = token_ids.reshape(-1)
        self._applies = applies

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return what the original returns, [rows, vocab] -> [rows, vocab]."""
        if not self._applies(ids.shape[-1]):
            return scores
        known = self._token_ids.to(scores.device)
        known = known[(known >= 0) & (known < scores.shape[-1])]
        return scores.index_fill(1, known, -torch.inf)

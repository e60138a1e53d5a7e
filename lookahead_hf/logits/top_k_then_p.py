"""Top-p after top-k, equal bit for bit to transformers', without a sort of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.generation import logits_process as hf


class TopKThenP:
    """Both warpers in one: a search for the k best replaces the sort.

    The sorted scores are known without a sort: nothing, then ties with the last of the k best, then
    these. Top-p sums exactly these numbers in this order, since another order could round the cut
    elsewhere. Ties are in the order of their ids, as CUDA sorts them.
    """

    def __init__(self, top_k: hf.TopKLogitsWarper, top_p: hf.TopPLogitsWarper) -> None:
        self._top_k, self._top_p, self._least = top_k.top_k, top_p.top_p, top_p.min_tokens_to_keep

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return what the two leave, [rows, vocab] float32 -> [rows, vocab]."""
        vocab = scores.shape[1]
        best, found = scores.topk(min(self._top_k, vocab))
        last, k = best[:, -1:], best.shape[1]
        num_kept = (scores >= last).sum(1, keepdim=True)  # more than k where the last are tied
        behind = torch.arange(vocab - 1, -1, -1, device=scores.device)
        ascending = torch.where(behind < num_kept, last, -torch.inf)
        ascending[:, -k:] = best.flip(1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - self._top_p
        removed[:, -self._least :] = False

        tied = scores == last
        place = vocab - num_kept + tied.cumsum(1, dtype=torch.int32) - 1
        cut = removed.gather(1, place.clamp(0, vocab - 1)) & tied
        found, order = found.sort(1)
        best, order = best.gather(1, order).sort(dim=1, stable=True)
        found = found.gather(1, order)
        cut.scatter_(1, found, torch.where(best > last, removed[:, -k:], cut.gather(1, found)))
        return scores.masked_fill(cut | (scores < last), -torch.inf)


def joined(processors: Iterable[Any]) -> list[Any]:
    """Return the processors, with each top-k and the top-p directly after it joined."""
    out: list[Any] = []
    for each in processors:
        before: Any = out[-1] if out else None
        kinds = type(before), type(each)
        if kinds == (hf.TopKLogitsWarper, hf.TopPLogitsWarper) and (
            before.filter_value == each.filter_value == -torch.inf
        ):
            out[-1] = TopKThenP(before, each)
        else:
            out.append(each)
    return out

"""Faster twins of transformers' processors for one row on a CPU, equal bit for bit.

Temperature, top-k, top-p and min-p keep the row's largest scores and drop the rest, so the smallest
score that is kept decides everything. The twin finds it among the largest scores, in double
precision, and uses it only if no rounding of the original could have kept another set: the cut must
separate unequal scores, further from the threshold than the error of the original's sums. All other
rows go to the original: one in a thousand, or one in eight for logits rounded to bfloat16, since
the original breaks ties in its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf

_CHUNK = 32
"""Scores per chunk in the search for the largest: 21 us for 128 of 49,152, `topk` takes 89."""

_LISTED = 256
"""Number of largest scores that are listed if no top-k limits it."""

_MANY_EQUAL = 0.1
"""Share of equal neighbours among the largest scores above which a cut likely splits a tie."""

_ROUNDING = 2.0**-24
"""Greatest relative error of one float32 operation."""

_EXP_ERROR = 1e-5
"""Greatest relative error of a float32 softmax entry, apart from its sum's, with a margin."""


def fuse(processors: list[Any]) -> list[Any]:
    """Replace processors by faster twins; a run of temperature, top-k, top-p and min-p by one."""
    fused: list[Any] = []
    run: list[Any] = []
    for processor in processors:
        cuts = type(processor) in _CUTS and processor.filter_value == -torch.inf
        if not cuts:
            fused += _closed(run)
            run = []
        if cuts or type(processor) is hf.TemperatureLogitsWarper:
            run.append(processor)
        else:
            fused.append(ban(processor) or processor)
    return fused + _closed(run)


def _closed(run: list[Any]) -> list[Any]:
    return [Truncation(run)] if any(type(processor) in _CUTS for processor in run) else run


def largest(row: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest scores of a row, largest first: [vocab] -> [count].

    They are in the `count` chunks with the largest maxima, whichever of tied chunks are chosen.
    """
    chunks = len(row) // _CHUNK
    if chunks < 2 * count:
        return row.topk(count).values
    body = row[: chunks * _CHUNK].view(chunks, _CHUNK)
    best = body.amax(1).topk(count, sorted=False).indices
    rest = row[chunks * _CHUNK :]
    return torch.cat([body[best].flatten(), rest]).topk(count).values


@dataclass(frozen=True, slots=True)
class _Head:
    """A row's largest scores, and what later cuts need to know about the others.

    Attributes:
        row: All scores, [vocab].
        values: The largest, descending, [listed] float32.
        weights: `exp(values - values[0])`, [listed] float64.
        kept: Number of them that no cut has removed.
        is_open: Whether scores beyond the list are kept too.
    """

    row: torch.Tensor
    values: np.ndarray
    weights: np.ndarray
    kept: int
    is_open: bool = True

    @staticmethod
    def of(row: torch.Tensor, count: int) -> _Head | None:
        """Return the head of a row, None if its largest score is not finite."""
        values = largest(row, count).numpy()
        if not np.isfinite(values[0]):
            return None
        return _Head(row, values, np.exp(values.astype(np.float64) - values[0]), count)

    def total(self) -> float:
        """Return the weight of everything that is kept."""
        if not self.is_open:
            return float(self.weights[: self.kept].sum())
        return float((self.row - float(self.values[0])).exp_().sum(dtype=torch.float64))

    def equal_neighbours(self) -> float:
        """Return the share of the listed scores that equal the next one."""
        return float((self.values[1:] == self.values[:-1]).mean())

    def cut(self, certain: int, possible: int, at_least: int = 1) -> _Head | None:
        """Keep the largest; return None if their number is uncertain or the cut splits a tie.

        Args:
            certain: Number of scores that every rounding of the original keeps.
            possible: Number of scores that some rounding keeps.
            at_least: Number of scores that are kept in any case.
        """
        if possible == self.kept and not self.is_open:
            return self if max(certain, at_least) >= self.kept else None
        kept = max(certain, at_least)
        if kept != max(possible, at_least) or kept >= self.kept:
            return None
        if self.values[kept] == self.values[kept - 1]:
            return None
        return replace(self, kept=kept, is_open=False)


def _top_k(head: _Head, warper: Any) -> _Head | None:
    if warper.top_k > head.kept:
        return None if head.is_open else head
    lowest = head.values[warper.top_k - 1]
    kept = int(np.count_nonzero(head.values[: head.kept] >= lowest))
    return head.cut(kept, kept)


def _top_p(head: _Head, warper: Any) -> _Head | None:
    shares = head.weights[: head.kept] / head.total()
    cumulative = np.cumsum(shares)
    beyond = max(0.0, 1.0 - float(cumulative[-1])) if head.is_open else 0.0
    # Ascending float32 sums in at least four lanes; a float64 running sum adds no error of weight.
    additions = float(shares @ np.arange(1, head.kept + 1)) + beyond * len(head.row) / 8
    margin = _EXP_ERROR + _ROUNDING * additions
    from_below = 1.0 - (cumulative - shares)
    removed = 1.0 - warper.top_p
    certain, possible = (int(np.count_nonzero(from_below > removed + m)) for m in (margin, -margin))
    return head.cut(certain, possible, warper.min_tokens_to_keep)


def _min_p(head: _Head, warper: Any) -> _Head | None:
    certain, possible = (
        int(np.count_nonzero(head.weights[: head.kept] >= warper.min_p * (1 + m)))
        for m in (2 * _EXP_ERROR, -2 * _EXP_ERROR)
    )
    return head.cut(certain, possible, warper.min_tokens_to_keep)


_CUTS: dict[type, Callable[[_Head, Any], _Head | None]] = {
    hf.TopKLogitsWarper: _top_k,
    hf.TopPLogitsWarper: _top_p,
    hf.MinPLogitsWarper: _min_p,
}


class Truncation:
    """An optional temperature and the cuts after it, in one pass over the row."""

    def __init__(self, run: list[Any]) -> None:
        """`run`: transformers' warpers, in order."""
        self._scaling = run[:1] if type(run[0]) is hf.TemperatureLogitsWarper else []
        self._cuts = run[len(self._scaling) :]
        first = self._cuts[0]
        # Room for scores that equal the k-th.
        self._listed = first.top_k + 64 if type(first) is hf.TopKLogitsWarper else _LISTED
        self._is_top_p = len(self._cuts) == 1 and type(first) is hf.TopPLogitsWarper

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply the run to one row, [1, vocab] float32 on a CPU -> [1, vocab]."""
        for warper in self._scaling:
            scores = warper(ids, scores)
        lowest = self._lowest_kept(scores)
        if lowest is not None:
            below = float(np.nextafter(lowest, np.float32(-np.inf)))
            return torch.nn.functional.threshold(scores, below, -torch.inf)
        for warper in self._cuts:
            scores = warper(ids, scores)
        return scores

    def _lowest_kept(self, scores: torch.Tensor) -> np.float32 | None:
        """Return the smallest score that all cuts keep, None if only the original can decide."""
        first = _Head.of(scores[0], self._listed) if 2 * self._listed <= scores.shape[1] else None
        head = first
        for warper in self._cuts:
            head = None if head is None else _CUTS[type(warper)](head, warper)
        if head is not None:
            return head.values[head.kept - 1]
        if self._is_top_p and first is not None and first.equal_neighbours() < _MANY_EQUAL:
            return _lowest_by_sorting(scores, self._cuts[0])
        return None


def _lowest_by_sorting(scores: torch.Tensor, warper: Any) -> np.float32 | None:
    """Return top-p's smallest kept score by the original's own sums.

    numpy sorts values in a quarter of the time that torch takes for values and indices.
    """
    values = np.sort(scores.numpy())
    cumulative = torch.from_numpy(values).softmax(-1).cumsum(-1)
    removed = int((cumulative <= 1 - warper.top_p).sum())
    removed = max(0, min(removed, values.shape[1] - warper.min_tokens_to_keep))
    lowest = values[0, removed]
    return lowest if removed == 0 or values[0, removed - 1] < lowest else None


class Ban:
    """Bans tokens at certain prefix lengths, without a search through the vocabulary.

    The originals spend 0.4 ms per token on that search, even once they no longer ban anything.
    """

    def __init__(self, token_ids: torch.Tensor, applies: Callable[[int], bool]) -> None:
        """`applies`: whether the tokens are banned after a prefix of a number of columns."""
        self._token_ids = token_ids.reshape(-1)
        self._applies = applies

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return what the original returns, [rows, vocab] -> [rows, vocab]."""
        if not self._applies(ids.shape[-1]):
            return scores
        known = self._token_ids.to(scores.device)
        known = known[(known >= 0) & (known < scores.shape[-1])]
        return scores.index_fill(1, known, -torch.inf)


def ban(processor: Any) -> Ban | None:
    """Return the twin of a processor that only bans tokens, None for any other."""
    kind, p = type(processor), processor
    if kind is hf.MinLengthLogitsProcessor:
        return Ban(p.eos_token_id, lambda columns: columns < p.min_length)
    if kind is hf.MinNewTokensLengthLogitsProcessor:
        return Ban(
            p.eos_token_id, lambda columns: columns - p.prompt_length_to_skip < p.min_new_tokens
        )
    if kind is hf.SuppressTokensLogitsProcessor:
        return Ban(p.suppress_tokens, lambda columns: True)
    if kind is hf.SuppressTokensAtBeginLogitsProcessor:
        return Ban(p.begin_suppress_tokens, lambda columns: columns == p.begin_index)
    return None

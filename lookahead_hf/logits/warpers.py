"""Faster twins of transformers' processors for one row on a CPU, equal bit for bit.

Temperature, top-k, top-p and min-p keep the row's largest scores and drop the rest. So it is enough
to know the smallest score that is kept. It is looked for among the largest, in double precision,
and taken only where no rounding of the original could have kept another set: where the cut lies
between unequal scores, further from the threshold than the original's sums can be off. What is left
over goes to the original: one row in a thousand, or one in eight where logits were rounded to
bfloat16, since the original sorts equal scores in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf

_CHUNK = 32
"""Scores compared at once when the largest are looked for: 21 us for 128 of 49,152, `topk` 89."""

_LISTED = 256
"""Largest scores that are listed where no top-k says how many matter."""

_MANY_EQUAL = 0.1
"""Share of equal neighbours among the largest above which a cut is likely to fall between such."""

_ROUNDING = 2.0**-24
"""Greatest relative error of one float32 operation."""

_EXP_ERROR = 1e-5
"""Greatest relative error of a float32 softmax entry besides its sum's, with room to spare."""


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
    """The `count` largest of a row, largest first: [vocab] -> [count].

    They stand in the `count` chunks with the largest maxima, whichever of equal chunks are taken.
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
    """A row's largest scores, with what later cuts need to know about the others.

    Attributes:
        row: All scores, [vocab].
        values: The largest, descending, [listed] float32.
        weights: `exp(values - values[0])`, [listed] float64.
        kept: How many of them no cut has removed.
        is_open: Whether scores beyond the list are kept too.
    """

    row: torch.Tensor
    values: np.ndarray
    weights: np.ndarray
    kept: int
    is_open: bool = True

    @staticmethod
    def of(row: torch.Tensor, count: int) -> _Head | None:
        """The head of a row, None where its largest score is not finite."""
        values = largest(row, count).numpy()
        if not np.isfinite(values[0]):
            return None
        return _Head(row, values, np.exp(values.astype(np.float64) - values[0]), count)

    def total(self) -> float:
        """Weight of everything that is kept."""
        if not self.is_open:
            return float(self.weights[: self.kept].sum())
        return float((self.row - float(self.values[0])).exp_().sum(dtype=torch.float64))

    def equal_neighbours(self) -> float:
        """Share of the listed scores that equal the next."""
        return float((self.values[1:] == self.values[:-1]).mean())

    def cut(self, certain: int, possible: int, at_least: int = 1) -> _Head | None:
        """Keep the largest, None where their number is not certain or the cut splits equal scores.

        Args:
            certain: Scores that are kept whatever the original's rounding.
            possible: Scores that some rounding would keep.
            at_least: Scores that are kept in any case.
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
    """A temperature (or none) and the cuts after it, in one look at the row."""

    def __init__(self, run: list[Any]) -> None:
        """`run`: transformers' warpers, in order."""
        self._scaling = run[:1] if type(run[0]) is hf.TemperatureLogitsWarper else []
        self._cuts = run[len(self._scaling) :]
        first = self._cuts[0]
        # Room for scores that equal the k-th.
        self._listed = first.top_k + 64 if type(first) is hf.TopKLogitsWarper else _LISTED
        self._is_top_p = len(self._cuts) == 1 and type(first) is hf.TopPLogitsWarper

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """What the run gives for one row, [1, vocab] float32 on a CPU -> [1, vocab]."""
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
        """The smallest score that all cuts keep; None where only the original can tell."""
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
    """Top-p's smallest kept score by the original's own sums; numpy sorts values in a quarter of
    the time that torch takes for values and indices."""
    values = np.sort(scores.numpy())
    cumulative = torch.from_numpy(values).softmax(-1).cumsum(-1)
    removed = int((cumulative <= 1 - warper.top_p).sum())
    removed = max(0, min(removed, values.shape[1] - warper.min_tokens_to_keep))
    lowest = values[0, removed]
    return lowest if removed == 0 or values[0, removed - 1] < lowest else None


class Ban:
    """Bans tokens while the prefix has certain lengths, without looking them up in the vocabulary.

    The originals spend 0.4 ms per token on it, also after the last length at which they act.
    """

    def __init__(self, token_ids: torch.Tensor, applies: Callable[[int], bool]) -> None:
        """`applies`: whether they are banned after a prefix of so many columns."""
        self._token_ids = token_ids.reshape(-1)
        self._applies = applies

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """What the original gives, [rows, vocab] -> [rows, vocab]."""
        if not self._applies(ids.shape[-1]):
            return scores
        known = self._token_ids.to(scores.device)
        known = known[(known >= 0) & (known < scores.shape[-1])]
        return scores.index_fill(1, known, -torch.inf)


def ban(processor: Any) -> Ban | None:
    """The twin of a processor that does nothing but ban tokens; None for any other."""
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

"""Logits processors of all nodes of a step at once, on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf

from lookahead_hf.draft import DraftTree
from lookahead_hf.logits.row_processors import SCORES_ONLY
from lookahead_hf.logits.warpers import TopKThenP, banned, joined
from lookahead_hf.rows import Rows
from lookahead_hf.runner.outputs import pinned

_SCORES_ONLY = SCORES_ONLY - {
    hf.BarkEosPrioritizerLogitsProcessor,
    hf.EtaLogitsWarper,
    hf.TopHLogitsWarper,
    hf.TypicalLogitsWarper,
}
"""Processors, by exact type, that depend on a row of scores alone and not on the host."""


def admits(processors: Iterable[Any]) -> bool:
    """Return whether logits processors can be applied to all nodes at once, on the device."""
    kinds = _SCORES_ONLY | {hf.RepetitionPenaltyLogitsProcessor}
    return all(type(each) in kinds or banned(each) is not None for each in processors)


class NodeProcessors:
    """The processors of a call that `admits` them."""

    def __init__(self, processors: Iterable[Any]) -> None:
        """Read, before the first step, how much of the prompts penalties ignore."""
        self._processors = joined(processors)
        ignored = (getattr(each, "prompt_ignore_length", None) for each in self._processors)
        self._ignored = [
            each.cpu().numpy() if isinstance(each, torch.Tensor) else each or 0 for each in ignored
        ]

    def __call__(self, rows: Rows, draft: DraftTree, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [rows, width, vocab] float32, as plain has them after each prefix."""
        nodes = _Nodes(rows, draft, scores)
        for processor, ignored in zip(self._processors, self._ignored, strict=True):
            if type(processor) is hf.RepetitionPenaltyLogitsProcessor:
                penalty = processor.penalty
                changed = torch.where(scores < 0, scores * penalty, scores / penalty)
                scores = torch.where(nodes.seen(ignored), changed, scores)
            elif type(processor) in _SCORES_ONLY or isinstance(processor, TopKThenP):
                flat = scores.flatten(0, 1)
                no_ids = torch.empty(len(flat), 0, dtype=torch.long, device=flat.device)
                scores = processor(no_ids, flat).view_as(scores)
            elif (bans := banned(processor)) is not None:
                tokens, applies = bans
                scores = nodes.ban(scores, tokens, applies(nodes.columns))
        return scores


class _Nodes:
    """The prefixes of a step's nodes, copied to the device as far as processors need them.

    Attributes:
        columns: Columns of each node's prefix, the node's own included, [rows, width].
    """

    def __init__(self, rows: Rows, draft: DraftTree, scores: torch.Tensor) -> None:
        self._rows, self._device, self._vocab = rows, scores.device, scores.shape[2]
        self._tokens, self._parents, depth = draft.padded(scores.shape[1], rows.last_tokens)
        self._most_depth = int(depth.max())
        self.columns = rows.prompt_columns + rows.num_emitted[:, None] + depth

    def seen(self, ignored: int | np.ndarray) -> torch.Tensor:
        """Return which tokens are in each node's prefix, [rows, width, vocab] bool.

        The first `ignored` columns, of all rows or of each, [rows], do not count.
        """
        rows, width = self._tokens.shape
        first = np.broadcast_to(ignored, rows)
        prefix = np.full((rows, int(self.columns.max())), self._vocab)
        for row, start in enumerate(first.tolist()):
            ids = self._rows.ids(row)
            prefix[row, start : len(ids)] = ids[start:]
        seen = torch.zeros(rows, self._vocab + 1, dtype=torch.bool, device=self._device)
        seen = seen.scatter_(1, self._up(prefix), True)[:, None].repeat(1, width, 1)
        return seen.scatter_(2, self._up(self._paths(first)), True)[:, :, : self._vocab]

    def _paths(self, first: np.ndarray) -> np.ndarray:
        """Return tokens from each node up, from column `first` on, [rows, width, 1 + depth]."""
        tokens = np.where(self.columns > first[:, None], self._tokens, self._vocab)
        at = np.zeros_like(tokens) + np.arange(tokens.shape[1])
        found = [tokens]
        for _ in range(self._most_depth):
            at = np.maximum(np.take_along_axis(self._parents, at, 1), 0)
            found.append(np.take_along_axis(tokens, at, 1))
        return np.stack(found, -1)

    def ban(self, scores: torch.Tensor, tokens: torch.Tensor, where: np.ndarray) -> torch.Tensor:
        """Return the scores without these tokens at some nodes, [rows, width] bool."""
        if not where.any():
            return scores
        every = torch.arange(self._vocab, device=self._device)
        banned = torch.isin(every, tokens.to(self._device).reshape(-1))
        at = pinned(where, self._device).to(self._device, non_blocking=True)
        return scores.masked_fill(at[:, :, None] & banned, -torch.inf)

    def _up(self, ids: np.ndarray) -> torch.Tensor:
        """Copy ids to the device; ids without a score become the one behind all scores."""
        source = pinned(np.minimum(ids, self._vocab), self._device)
        return source.to(self._device, non_blocking=True)

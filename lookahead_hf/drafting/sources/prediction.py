"""Drafts from the caller's guess of the whole answer, found again after every edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.drafting.drafter import Drafter
from lookahead_hf.drafting.sources.prediction_alignment import (
    FIRST_RATES,
    LATER_RATES,
    NUM_BUCKETS,
    NUM_ORIGINS,
    NUM_RIGHT,
    Follower,
)

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows

MIN_SCORE = 1e-3

_FROM_ROOT = np.array([ROOT])


class PredictionDrafter(Drafter):
    """Proposes what the caller predicted: one chain while the prediction holds, after an edit one
    from each place where the text may have come back to it."""

    name: ClassVar[str] = "prediction"

    def __init__(self, predictions: Sequence[np.ndarray]) -> None:
        """Take the predictions.

        Args:
            predictions: Token ids of the answers, [length] each: one per row, or per prompt where
                every prompt has several rows, one after another.

        Raises:
            ValueError: There is none.
        """
        if not len(predictions):
            raise ValueError("predictions is empty: give one array of token ids per row")
        self._predictions = [np.asarray(prediction, np.int64) for prediction in predictions]
        self._followers: list[Follower] = []
        self.rates = self.prior()

    @property
    def num_buckets(self) -> int:
        return NUM_BUCKETS

    def prior(self) -> np.ndarray:
        return np.maximum.outer(FIRST_RATES, LATER_RATES).astype(np.float32).ravel()

    def begin(self, rows: Rows) -> None:
        each, rest = divmod(rows.num_rows, len(self._predictions))
        if rest:
            raise ValueError(
                f"{len(self._predictions)} predictions were given for {rows.num_rows} rows: give "
                "one for each row, or one for all"
            )
        self._followers = [Follower(ids) for ids in self._predictions for _ in range(each)]
        for row in range(rows.num_rows):
            self._follow(rows, row, int(rows.num_emitted[row]))

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        parts: list[_Part] = []
        sizes = np.zeros(rows.num_rows + 1, np.int64)
        for row in np.flatnonzero(rows.live).tolist():
            follower = self._followers[row]
            chains = [follower.chain(place, max_nodes) for place in follower.places]
            branches = _branches(_likeliest(chains, max_nodes, self.rates))
            sizes[row + 1] = sum(len(branch.token_ids) for branch in branches)
            parts += branches
        return _joined(parts, sizes.cumsum()) if parts else DraftTree.empty(rows.num_rows)

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        for row in np.flatnonzero(verdict.num_emitted).tolist():
            self._follow(rows, row, int(verdict.num_emitted[row]))

    def end(self, rows: Rows) -> None:
        self._followers = []

    def _follow(self, rows: Rows, row: int, num_new: int) -> None:
        rates = self.rates.reshape(NUM_ORIGINS, NUM_RIGHT)
        self._followers[row].follow(rows.emitted(row), num_new, rates)


class _Part(NamedTuple):
    """Nodes of a row that hang one on the other."""

    token_ids: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    bucket: np.ndarray
    score: np.ndarray


_Chain = tuple[np.ndarray, np.ndarray, np.ndarray]  # token ids, buckets and scores, [length] each


def _likeliest(
    chains: list[tuple[np.ndarray, np.ndarray]],  # token ids and buckets, [length] each
    max_nodes: int,
    rates: np.ndarray,  # [NUM_BUCKETS]
) -> list[_Chain]:
    """The chains, cut to their `max_nodes` likeliest tokens taken together."""
    scores = [np.cumprod(rates[buckets]) for _, buckets in chains]
    every = np.concatenate(scores) if scores else np.empty(0)
    owner = np.repeat(np.arange(len(scores)), [len(score) for score in scores])
    best = np.argsort(-every, kind="stable")[:max_nodes]
    sizes = np.bincount(owner[best[every[best] >= MIN_SCORE]], minlength=len(chains)).tolist()
    return [
        (tokens[:size], buckets[:size], score[:size])
        for (tokens, buckets), score, size in zip(chains, scores, sizes, strict=True)
        if size
    ]


def _branches(chains: list[_Chain]) -> list[_Part]:
    """The chains as one tree: each hangs where it leaves the one with which it shares most."""
    parts: list[_Part] = []
    placed: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for tokens, buckets, score in chains:
        stem = max((_stem(tokens, *other) for other in placed), key=len, default=_FROM_ROOT)
        shared = len(stem) - 1
        depth = np.arange(shared, len(tokens)) + 1
        nodes = np.concatenate([stem, np.arange(count, count + len(depth))])
        parts.append(
            _Part(tokens[shared:], nodes[shared:-1], depth, buckets[shared:], score[shared:])
        )
        placed.append((tokens, nodes))
        count += len(depth)
    return parts


def _stem(tokens: np.ndarray, other: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """The nodes, ROOT first, that another chain has for the tokens with which both begin."""
    length = min(len(tokens), len(other))
    differs = np.flatnonzero(tokens[:length] != other[:length])
    return nodes[: 1 + (int(differs[0]) if len(differs) else length)]


def _joined(parts: list[_Part], row_offsets: np.ndarray) -> DraftTree:
    """The tree of all rows, every node with its bucket as its evidence."""
    token_ids, parents, depth, bucket, score = (
        np.concatenate(field) for field in zip(*parts, strict=True)
    )
    tree = DraftTree(
        row_offsets, token_ids, parents.astype(np.int32), depth.astype(np.int32), score
    )
    return tree.with_buckets(bucket)

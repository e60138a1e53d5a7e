"""Drafts from the caller's prediction of the whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, RowDraft
from lookahead_hf.drafting.drafter import BuiltInDrafter
from lookahead_hf.drafting.sources.prediction_alignment import (
    FIRST_RATES,
    LATER_RATES,
    NUM_BUCKETS,
    NUM_ORIGINS,
    NUM_RIGHT,
    Alignment,
)

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows

MIN_SCORE = 1e-3


class PredictionDrafter(BuiltInDrafter):
    """Proposes what the caller predicted: after an edit, from each place where the text may have
    returned."""

    name: ClassVar[str] = "prediction"
    num_buckets = NUM_BUCKETS

    def __init__(self, predictions: Sequence[np.ndarray]) -> None:
        """Take the ids of the answers, [length] each: one per row, or one per prompt's rows."""
        self._predictions = [np.asarray(prediction, np.int64) for prediction in predictions]
        self._alignments: list[Alignment] = []
        self.rates = self.prior()

    def prior(self) -> np.ndarray:
        return np.maximum.outer(FIRST_RATES, LATER_RATES).astype(np.float32).ravel()

    def begin(self, rows: Rows) -> None:
        each = rows.num_rows // len(self._predictions)
        self._alignments = [Alignment(ids) for ids in self._predictions for _ in range(each)]

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        drafts = [RowDraft() for _ in range(rows.num_rows)]
        for row in np.flatnonzero(rows.live).tolist():
            for chain in self.chains(rows, row, max_nodes):
                node = ROOT
                for token, bucket, score in zip(*(part.tolist() for part in chain), strict=True):
                    if score < MIN_SCORE:
                        break
                    node = drafts[row].child(node, token, bucket, score)
        return DraftTree.from_drafts(drafts)

    def chains(self, rows: Rows, row: int, max_nodes: int) -> list[tuple[np.ndarray, ...]]:
        """Follow the text of a row and return what may come next, likeliest first.

        Each place where the text may be gives a chain: tokens, buckets and scores, [nodes] each.
        """
        alignment, rates = self._alignments[row], self.rates.reshape(NUM_ORIGINS, NUM_RIGHT)
        alignment.follow(rows.emitted(row), rates)
        chains = [alignment.chain(place, max_nodes) for place in alignment.places]
        return [(tokens, buckets, self.rates[buckets].cumprod()) for tokens, buckets in chains]

    def end(self, rows: Rows) -> None:
        self._alignments = []

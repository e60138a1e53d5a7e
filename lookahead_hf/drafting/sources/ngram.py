"""Drafts from the text itself: what followed the same tokens earlier in prompt and output.

Prompt lookup follows one earlier occurrence. This drafter merges all recent ones into a tree. How
far it follows a path depends on how often matches of that length and number were right so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import ClassVar

import numpy as np

from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, Step, Traits
from lookahead_hf.ngram_pool import SuffixIndexes
from lookahead_hf.ngram_pool.matches import BORDER, NUM_BUCKETS
from lookahead_hf.rows import Rows

# Measured on texts of a 135M model, on source code and on prose.
ONLY_CONTINUATION = (0.28, 0.40, 0.52, 0.60, 0.63, 0.71, 0.72, 0.76, 0.82, 0.92, 0.97)
"""Acceptance rate by match-length class when there is one known continuation."""
MISSES_LEFT = (1.0, 0.65, 0.5)
"""Scales the miss rate if a continuation was seen once, twice or more often."""
SHARES_LEFT = (0.08, 0.22, 0.45, 1.0)
"""Scales the acceptance rate by the continuation's share of the matches, in quarters."""


def rates_of(only_continuation: Sequence[float]) -> np.ndarray:
    """Return a rate for every bucket, [NUM_BUCKETS], from the rates of only continuations."""
    misses = np.multiply.outer(1 - np.array(only_continuation), MISSES_LEFT)
    # [match lengths, shares, totals]
    rates = (1 - misses)[:, None, :] * np.array(SHARES_LEFT)[:, None]
    return rates.astype(np.float32).ravel()


class NgramDrafter(Drafter):
    """Grows one tree per row from an index of the row's text and of its encoder's text, if any."""

    name: ClassVar[str] = "ngram"
    traits = Traits(NUM_BUCKETS, rates_of(ONLY_CONTINUATION), widens=True)
    _indexes: SuffixIndexes | None = None

    def begin(self, rows: Rows) -> None:
        self._indexes = SuffixIndexes(rows.num_rows)
        self._index(rows, range(rows.num_rows))

    def begin_row(self, rows: Rows, row: int) -> None:
        assert self._indexes is not None, "begin() comes first"
        self._indexes.clear(row)
        self._index(rows, [row])

    def _index(self, rows: Rows, chosen: Collection[int]) -> None:
        assert self._indexes is not None
        texts = [np.empty(0, np.int64)] * rows.num_rows
        for row in chosen:
            before = [] if rows.encoder_ids is None else [rows.encoder_ids[row], [BORDER]]
            texts[row] = np.concatenate([*before, rows.context(row)])
        offsets = np.array([0, *accumulate(map(len, texts))])
        self._indexes.extend(offsets, np.concatenate(texts))

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        assert self._indexes is not None, "begin() comes first"
        offsets, tokens, parents, depth, score, buckets = self._indexes.grow(
            self.rates, max_nodes, rows.live
        )
        return DraftTree(offsets, tokens, parents, depth, score).with_buckets(buckets)

    def observe(self, step: Step) -> None:
        assert self._indexes is not None, "begin() comes first"
        self._indexes.extend(step.verdict.token_offsets, step.verdict.token_ids)

    def end(self, rows: Rows) -> None:
        self._indexes = None

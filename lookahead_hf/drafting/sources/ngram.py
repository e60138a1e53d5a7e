"""Drafts from the text itself: what followed the same tokens earlier in prompt and output.

Prompt lookup follows one earlier occurrence. This drafter merges all recent ones into a tree. How
far it follows a path depends on how often matches of that length and number were right so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lookahead_hf.draft import DraftTree
from lookahead_hf.drafting.drafter import Drafter, Step, Traits
from lookahead_hf.ngram_pool import SuffixIndexes
from lookahead_hf.ngram_pool.matches import BORDER, LONGEST_MATCH, NUM_BUCKETS, check_limits

if TYPE_CHECKING:
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
    """Grows one tree per row from an index of the row's text and of its encoder's text, if any.

    With `keep` the index outlives the call, for texts that several calls continue, such as a
    conversation. A call of one row then adds what is new in its prompt. If the prompt differs from
    some token on, the earlier text stays known.

    Attributes:
        limits: The shortest and the longest match length that are told apart.
    """

    name: ClassVar[str] = "ngram"
    traits = Traits(NUM_BUCKETS, rates_of(ONLY_CONTINUATION), widens=True)

    def __init__(
        self, *, min_ngram: int = 1, max_ngram: int = LONGEST_MATCH, keep: bool = False
    ) -> None:
        """Validate the options.

        Args:
            min_ngram: Shortest match that is drafted from.
            max_ngram: Longest match that is told from shorter ones.
            keep: Whether the index of a single row outlives a call of this object.

        Raises:
            ValueError: An option has the wrong type, or not `1 <= min_ngram <= max_ngram <= 32`.
        """
        check_limits(min_ngram, max_ngram)
        if not isinstance(keep, bool):
            raise ValueError(f"ngram: keep must be True or False, not {keep!r}")
        self.limits, self._keep = (min_ngram, max_ngram), keep
        self._indexes: SuffixIndexes | None = None
        self._known = np.empty(0, np.int64)  # with `keep`, the index's text after its last border
        self._num_known = 0

    def begin(self, rows: Rows) -> None:
        if rows.num_rows == 1 and self._indexes is not None:
            self._indexes.extend(*flat([self._new_tokens(rows.context(0))]))
        else:
            self._indexes = SuffixIndexes(rows.num_rows, *self.limits)
            self._index(rows, range(rows.num_rows))
        self._num_known = len(rows.context(0))

    def begin_row(self, rows: Rows, row: int) -> None:
        assert self._indexes is not None, "begin() comes first"
        self._indexes.clear(row)
        self._index(rows, [row])

    def _index(self, rows: Rows, chosen: Collection[int]) -> None:
        """Index the texts of some rows, and of their encoders."""
        assert self._indexes is not None
        nothing = np.empty(0, np.int64)
        texts = [nothing] * rows.num_rows
        if rows.encoder_ids is not None:
            for row in chosen:
                texts[row] = np.append(rows.encoder_ids[row], BORDER)
            self._indexes.extend(*flat(texts))
        for row in chosen:
            texts[row] = rows.context(row)
        self._indexes.extend(*flat(texts))

    def _new_tokens(self, context: np.ndarray) -> np.ndarray:  # [tokens] both
        """Return what a kept index lacks of the context, after a border if another text begins."""
        shorter = min(len(self._known), len(context))
        differs = np.flatnonzero(self._known[:shorter] != context[:shorter])
        num_same = int(differs[0]) if len(differs) else shorter
        border = [BORDER] if num_same < len(self._known) else []
        return np.array([*border, *context[num_same:]], np.int64)

    def propose(self, rows: Rows, max_nodes: int) -> DraftTree:
        assert self._indexes is not None, "begin() comes first"
        offsets, tokens, parents, depth, score, buckets = self._indexes.grow(
            self.rates, max_nodes, rows.live
        )
        return DraftTree(offsets, tokens, parents, depth, score).with_buckets(buckets)

    def observe(self, step: Step) -> None:
        assert self._indexes is not None, "begin() comes first"
        self._indexes.extend(step.verdict.token_offsets, step.verdict.token_ids)
        self._num_known = len(step.rows.context(0))

    def end(self, rows: Rows) -> None:
        if self._keep and rows.num_rows == 1:
            self._known = rows.context(0)[: self._num_known].copy()
        else:
            self._indexes = None


def flat(texts: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate texts: the offset of each, [texts + 1], and all their tokens."""
    return np.array([0, *accumulate(map(len, texts))]), np.concatenate(texts)

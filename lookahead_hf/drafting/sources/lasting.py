"""Drafts from a text that several calls write one after the other, such as a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.drafting.sources.ngram import NgramDrafter

if TYPE_CHECKING:
    import torch

    from lookahead_hf.rows import Rows

BORDER = -1
"""What parts, in an index, texts that do not follow each other."""


class LastingNgramDrafter(NgramDrafter):
    """The drafter "ngram" of one text, whose index outlives a call.

    A call of one row takes into the index what its prompt adds to the text of the call before.
    Where the prompt says something else from some token on, the other text stays known.
    """

    def __init__(self, **options: Any) -> None:
        """Takes the options of the drafter "ngram"."""
        super().__init__(**options)
        self._known = np.empty(0, np.int64)  # the index's text after its last border
        self._num_known = 0

    @property
    def kept_as(self) -> str:
        return f"{NgramDrafter.__module__}.{NgramDrafter.__qualname__}"

    def begin(self, rows: Rows) -> None:
        if rows.num_rows != 1 or not self._indexes:
            super().begin(rows)
        else:
            context, (index,) = rows.context(0), self._indexes
            same = _num_same(self._known, context)
            if same < len(self._known):
                index.extend([BORDER])
            index.extend(context[same:])
        self._num_known = len(rows.context(0))

    def observe(self, rows: Rows, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        super().observe(rows, draft, verdict, logits)
        self._num_known = len(rows.context(0))

    def end(self, rows: Rows) -> None:
        if rows.num_rows == 1:
            self._known = rows.context(0)[: self._num_known].copy()
        else:
            super().end(rows)


def _num_same(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens with which both begin, of two texts [length]."""
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if len(differs) else shorter

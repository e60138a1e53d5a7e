"""A drafter for an expected text that searches it for the longest run the written text ends with.

That is how servers use predicted outputs: what follows the run is verified, as one chain. Where the
text has nothing in common with the expected one, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead_hf import Drafter, DraftTree


class CommonRun(Drafter):
    """Drafts a chain of what follows the longest common run; the first of equal ones counts."""

    name = "common run"

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = np.asarray(expected)

    def propose(self, rows, max_nodes):  # type: ignore[no-untyped-def]
        return DraftTree.from_chains(
            [] if rows.finished[row] else [self._after(rows.emitted(row), max_nodes)]
            for row in range(rows.num_rows)
        )

    def _after(self, text: np.ndarray, most: int) -> np.ndarray:
        """Return at most `most` tokens that follow the longest suffix of the text, [tokens]."""
        ends = np.flatnonzero(self._expected[:-1] == text[-1])
        if not len(ends):
            return self._expected[:0]
        for length in range(1, len(text)):
            longer = ends[ends >= length]
            longer = longer[self._expected[longer - length] == text[-1 - length]]
            if not len(longer):
                break
            ends = longer
        return self._expected[ends[0] + 1 : ends[0] + 1 + most]

"""Verifies every row as a call of its own, by the rules of the request that it belongs to."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.batching.generators import OwnGenerators
from lookahead_hf.batching.rows import RefilledRows
from lookahead_hf.distributed.coordinator import Processes
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.verification.verifier import Verifier


class Seeded(Verifier):
    """Verifies a text whose tokens, processors or criteria draw from the default generators.

    They draw in plain's order, and what other texts draw in between does not count.
    """

    def __init__(self, verifier: Verifier, generators: OwnGenerators) -> None:
        """`verifier`: decides; `generators`: those of the text."""
        super().__init__(Processes())
        self.name, self._verifier, self._generators = verifier.name, verifier, generators

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        with self._generators.in_place():
            return self._verifier.verify(rows, draft, logits)


class EachRow(Verifier):
    """Hands every row to a verifier of its own.

    Attributes:
        errors: What the verifier of a row raised; its text has ended with that.
    """

    name = "walk"

    def __init__(self, num_rows: int) -> None:
        super().__init__(Processes())
        self._verifiers: list[Verifier | None] = [None] * num_rows
        self.errors: dict[int, Exception] = {}

    def take(self, rows: RefilledRows, row: int, verifier: Verifier, logits: torch.Tensor) -> None:
        """Begin another text in a row and emit its first token.

        The verifier sees a batch of this one row; `logits`, [1, 1, vocab], follow its prompt.
        """
        self._verifiers[row] = verifier
        verifier.first(rows.texts[row], logits)

    def free(self, row: int) -> None:
        """Let go of the verifier of a row."""
        self._verifiers[row] = None
        self.errors.pop(row, None)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        assert isinstance(rows, RefilledRows)
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        live = rows.live
        for row in np.flatnonzero(live).tolist():
            verifier = self._verifiers[row]
            assert verifier is not None
            try:
                own = logits[row : row + 1]
                verdict = verifier.verify(rows.texts[row], draft.of_row(row), own)
            except Exception as error:
                self.errors[row], live[row] = error, False
                rows.end(row)
                continue
            tokens[row], paths[row] = verdict.emitted(0).tolist(), verdict.accepted(0).tolist()
        return Verdict.from_rows(tokens, paths, live, rows.finished.copy())

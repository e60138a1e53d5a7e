"""Verifies each row of a queue by the rules of its request."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.batching.generators import OwnGenerators
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.verification.verifier import Verifier


class Seeded(Verifier):
    """Verifies a text whose tokens, processors or criteria draw from the default generators.

    They draw as in plain generation, whatever other texts draw meanwhile.
    """

    def __init__(self, verifier: Verifier, generators: OwnGenerators) -> None:
        super().__init__()
        self.name, self._verifier, self._generators = verifier.name, verifier, generators

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        with self._generators.in_place():
            return self._verifier.verify(rows, draft, logits)


class EachRow(Verifier):
    """Gives every row a verifier of its own; `errors` has the exceptions that ended texts."""

    name = "walk"

    def __init__(self) -> None:
        super().__init__()
        self._verifiers: dict[int, Verifier] = {}
        self.errors: dict[int, Exception] = {}

    def take(self, rows: Rows, row: int, verifier: Verifier, logits: torch.Tensor) -> None:
        """Emit the first token of another text in a row, by the logits, [1, 1, vocab]."""
        self._verifiers[row] = verifier
        verifier.first(rows.of_row(row, 1), logits)

    def free(self, row: int) -> None:
        """Forget the verifier of a row."""
        self._verifiers.pop(row, None)
        self.errors.pop(row, None)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        tokens: list[list[int]] = [[] for _ in range(rows.num_rows)]
        paths: list[list[int]] = [[] for _ in range(rows.num_rows)]
        live = rows.live
        for row in np.flatnonzero(live).tolist():
            own = draft.of_row(row)
            try:
                alone = rows.of_row(row, 1 + own.num_nodes)
                verdict = self._verifiers[row].verify(alone, own, logits[row : row + 1])
            except Exception as error:
                self.errors[row], live[row] = error, False
                rows.end(row)
                continue
            tokens[row], paths[row] = verdict.emitted(0).tolist(), verdict.accepted(0).tolist()
        return Verdict.from_rows(tokens, paths, live, rows.finished.copy())

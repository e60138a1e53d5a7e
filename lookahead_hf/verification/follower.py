"""Verification where another process decides: ask all that is asked elsewhere, obey what is told.

Processors, criteria and random generators go through the same as in the process that decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lookahead_hf.distributed.message import Told
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.verification.lockstep import Lockstep
from lookahead_hf.verification.walk import Decide, Rules, Walk


class ToldWalk(Walk):
    """The walk along a path that another process chose."""

    def __init__(self, rules: Rules, told: Callable[[], Told]) -> None:
        super().__init__(rules)
        self._receive = told

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        self._told = self._receive()
        return super().verify(rows, draft, logits)

    def _decider(
        self,
        rows: Rows,
        row: int,
        draft: DraftTree,
        logits: torch.Tensor,
        choices: np.ndarray | None,
    ) -> Decide:
        own = super()._decider(rows, row, draft, logits, choices)
        tokens = iter(self._told.tokens[row])
        path = iter(self._told.paths[row])

        def decide(node: int) -> tuple[int, int | None]:
            own(node)
            return next(tokens), next(path, None)

        return decide

    def _stops(self, rows: Rows, row: int, token: int) -> bool:
        super()._stops(rows, row, token)
        told = self._told
        return bool(told.finished[row]) and int(rows.num_emitted[row]) == int(told.num_text[row])


class ToldLockstep(Lockstep):
    """Decoding steps of all rows whose tokens another process chose."""

    def __init__(self, *args: Any, told: Callable[[], Told]) -> None:
        super().__init__(*args)
        self._receive = told

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        self._told, self._at = self._receive(), 0
        return super().verify(rows, draft, logits)

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        super()._chosen(scores)
        tokens = [row[self._at] for row in self._told.tokens]
        self._at += 1
        return torch.tensor(tokens)

    def _asked(self, rows: Rows) -> np.ndarray:
        super()._asked(rows)
        ended: np.ndarray = self._told.finished & (self._told.num_text <= rows.num_emitted)
        return ended

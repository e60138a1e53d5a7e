"""Verification if another process decides.

Processors, criteria and random generators are asked as in the process that decides, so that their
states are the same everywhere. Then the tokens that were received are emitted.
"""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.distributed.coordinator import StepMessage
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.verification.lockstep import Lockstep
from lookahead_hf.verification.verifier import Verifier
from lookahead_hf.verification.walk import Decide, Walk


class _Follower(Verifier):
    """Receives the decision of another process before each step."""

    _message: StepMessage
    _at = 0  # decoding steps of the message that were taken

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        assert self._processes.receive is not None
        self._message, self._at = self._processes.receive(), 0
        return super().verify(rows, draft, logits)


class FollowerWalk(_Follower, Walk):
    """Walks along the path that another process chose."""

    def _decider(self, rows: Rows, row: int, draft: DraftTree, logits: torch.Tensor) -> Decide:
        own = super()._decider(rows, row, draft, logits)
        tokens = iter(self._message.verdict.emitted(row).tolist())
        path = iter(self._message.verdict.accepted(row).tolist())

        def decide(node: int) -> tuple[int, int | None]:
            own(node)
            return next(tokens), next(path, None)

        return decide

    def _emit(self, rows: Rows, row: int, token: int) -> bool:
        message = self._message
        is_last = int(rows.num_emitted[row]) + 1 == int(message.num_text[row])
        stops = bool(message.verdict.finished[row]) and is_last
        return self.rules.emitter.emit(rows, row, token, stops)


class FollowerLockstep(_Follower, Lockstep):
    """Takes all rows through the decoding steps whose tokens another process chose."""

    def _chosen(self, rows: Rows, logits: torch.Tensor) -> np.ndarray:
        super()._chosen(rows, logits)
        verdict = self._message.verdict
        tokens: np.ndarray = verdict.token_ids[verdict.token_offsets[:-1] + self._at]
        self._at += 1
        return tokens

    def _emit(self, rows: Rows, tokens: list[int]) -> None:
        message = self._message
        ended = message.verdict.finished & (message.num_text <= rows.num_emitted + 1)
        self._emitter.emit_to_all(rows, tokens, ended)

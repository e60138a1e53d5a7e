"""Verifies all rows column by column, and follows another process."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.call.emitter import Emitter, take_edits
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.logits.row_processors import check_scores
from lookahead_hf.rows import Rows
from lookahead_hf.runner.processes import Processes, StepMessage
from lookahead_hf.verification.verifier import Verifier
from lookahead_hf.verification.walk import Decide, Walk


class Lockstep(Verifier):
    """Calls processors and criteria once per decoding step, with plain's own [rows, columns].

    The walk goes on while every row has a child with its token. A finished row is fed pads, as in
    plain, and its draft is pads, so that it does not hold the others up. Without an eos criterion
    plain goes on with finished rows until all have finished; here they count as live until then.
    """

    name = "lockstep"

    def __init__(self, call: PreparedCall, emitter: Emitter, processes: Processes) -> None:
        super().__init__(processes)
        self._processors, self._do_sample, self._emitter = call.processors, call.do_sample, emitter

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Draft the pads that finished rows will be fed."""
        pad = self._emitter.pad
        if pad is None or not rows.finished.any() or not draft.num_nodes:
            return draft
        return draft.with_chains(np.full(int(draft.depth.max()), pad), rows.finished)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        live, before = rows.live, rows.num_text
        tokens: list[list[int]] = []  # [rows] of each decoding step
        paths: list[list[int]] = []  # [rows] of each decoding step but the last
        every = torch.arange(rows.num_rows, device=logits.device)
        nodes = [ROOT] * rows.num_rows
        while True:
            at = torch.tensor(nodes, device=logits.device) + 1
            chosen = self._chosen(rows, logits[every, at])
            if self._emitter.pad is not None:
                chosen[rows.finished] = self._emitter.pad
            self._emit(rows, chosen.tolist())
            tokens.append(rows.last_tokens.tolist())
            if not rows.live.any():
                break
            reached = zip(nodes, tokens[-1], strict=True)
            children = [draft.child_of(row, *at) for row, at in enumerate(reached)]
            if None in children:
                break
            nodes = [child for child in children if child is not None]
            paths.append(nodes)
        by_row = [[step[row] for step in tokens] for row in range(rows.num_rows)]
        path_of = [[step[row] for step in paths] for row in range(rows.num_rows)]
        finished = rows.finished.copy()
        return Verdict.from_rows(by_row, path_of, live, finished, rows.num_text - before)

    def _chosen(self, rows: Rows, logits: torch.Tensor) -> np.ndarray:
        """Choose the next token of all rows as plain does, [rows]; `logits` are [rows, vocab]."""
        ids = self._emitter.all_ids(rows)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._emitter.device)
        scores = self._processors(ids, raw)
        check_scores(scores, self._do_sample)
        take_edits(rows, ids)
        for row in range(rows.num_rows):
            self._emitter.choose(row, scores[row], raw[row])
        if self._do_sample:
            chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        else:
            chosen = scores.argmax(-1)
        return chosen.to("cpu").numpy().astype(np.int64)

    def _emit(self, rows: Rows, tokens: list[int]) -> None:
        """Append a token to every row."""
        self._emitter.emit_to_all(rows, tokens)


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

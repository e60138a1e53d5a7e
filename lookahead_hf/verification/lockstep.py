"""Verifies all rows column by column."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.call.emitter import Emitter, take_edits
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.logits.row_processors import check_scores
from lookahead_hf.rows import Rows
from lookahead_hf.runner.processes import Processes
from lookahead_hf.verification.walk import Verifier


class Lockstep(Verifier):
    """Calls processors and criteria once per decoding step, with plain's own [rows, columns].

    The walk goes on while every row has a child with its token. A finished row is fed pads, as in
    plain, and its draft is pads, so that it does not hold the others up. Without an eos criterion
    plain goes on with finished rows until all have finished; here they count as live until then.
    Where another process decides, its tokens are emitted.
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
        receive = self._processes.receive
        message = None if receive is None else receive()
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
            ended = None
            if message is not None:
                decided = message.verdict
                chosen = decided.token_ids[decided.token_offsets[:-1] + len(tokens)]
                ended = decided.finished & (message.num_text <= rows.num_emitted + 1)
            self._emitter.emit_to_all(rows, chosen.tolist(), ended)
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

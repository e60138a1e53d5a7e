"""Lockstep: all rows take every decoding step together, as plain's batch does."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.call.outputs import RequestedOutputs
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.call.streaming import ColumnStream
from lookahead_hf.distributed.coordinator import Processes
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.rows import Rows
from lookahead_hf.verification.verifier import Verifier


class Lockstep(Verifier):
    """Calls processors and criteria once per decoding step, with plain's own [rows, columns].

    The walk goes on while every row has a child with its token. A finished row is fed pads, as in
    plain, and its draft is pads, so that it does not hold the others up. Without an eos criterion
    plain goes on with finished rows until all have finished; here they count as live until then.
    """

    name = "lockstep"

    def __init__(
        self,
        call: PreparedCall,
        outputs: RequestedOutputs,
        stream: ColumnStream,
        processes: Processes,
    ) -> None:
        super().__init__(processes)
        self._processors, self._criteria = call.processors, call.criteria
        self._do_sample, self._device = call.do_sample, call.input_ids.device
        self._outputs, self._stream = outputs, stream
        self._pad = call.pad if any(hasattr(c, "eos_token_id") for c in call.criteria) else None
        self._ended = np.zeros(1, bool)  # [rows] from the first step on

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Draft the pads that finished rows will be fed."""
        if self._pad is None or not rows.finished.any() or not draft.num_nodes:
            return draft
        return draft.with_chains(np.full(int(draft.depth.max()), self._pad), rows.finished)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        live, before = rows.live, rows.num_text
        tokens: list[list[int]] = []  # [rows] of each decoding step
        paths: list[list[int]] = []  # [rows] of each decoding step but the last
        every = torch.arange(rows.num_rows, device=logits.device)
        nodes = [ROOT] * rows.num_rows
        while True:
            at = torch.tensor(nodes, device=logits.device) + 1
            tokens.append(self._step(rows, logits[every, at]))
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

    def _step(self, rows: Rows, logits: torch.Tensor) -> list[int]:
        """Take one decoding step as plain does, and return the tokens of all rows."""
        ids = self._ids(rows)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._device)
        scores = self._processors(ids, raw)
        _take_edits(rows, ids)
        for row in range(rows.num_rows):
            self._outputs.choose(row, scores[row], raw[row])
        chosen = self._chosen(scores).to("cpu").numpy().astype(np.int64)
        if self._pad is not None:
            chosen[rows.finished] = self._pad
        tokens: list[int] = chosen.tolist()
        for row, token in enumerate(tokens):
            rows.emit(row, token)
        self._ended = self._asked(rows)
        if self._pad is not None or self._ended.all():
            rows.end(self._ended & rows.live)
        for row, token in enumerate(tokens):
            self._stream.push(row, token)
        return rows.last_tokens.tolist()

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the tokens, [rows], that are chosen by these scores, [rows, vocab]."""
        if self._do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        return scores.argmax(-1)

    def _asked(self, rows: Rows) -> np.ndarray:
        """Rows that the criteria have ended so far, [rows] bool."""
        going = np.broadcast_to(~self._ended, rows.num_rows).astype(np.int64)
        unfinished = torch.from_numpy(going).to(self._device)
        ids = self._ids(rows)
        unfinished = unfinished & ~self._criteria(ids, self._outputs.scores_so_far())
        _take_edits(rows, ids)
        return unfinished.to("cpu").numpy() == 0

    def _ids(self, rows: Rows) -> torch.Tensor:
        """The batch as plain holds it, [rows, columns]."""
        ids = np.stack([rows.ids(row) for row in range(rows.num_rows)])
        return torch.from_numpy(ids).to(self._device)


def _take_edits(rows: Rows, ids: torch.Tensor) -> None:  # [rows, columns]
    """Take over what processors or criteria have written into the ids."""
    for row, edited in enumerate(ids.cpu()):
        rows.rewrite(row, edited)

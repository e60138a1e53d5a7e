"""Lockstep: all rows take every step together, for what may look at the batch as a whole."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.distributed.coordinator import Alone
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.generation.call import PreparedCall
from lookahead_hf.generation.outputs import RequestedOutputs
from lookahead_hf.generation.streaming import ColumnStream
from lookahead_hf.rows import Rows
from lookahead_hf.verification.verifier import HostVerifier


class Lockstep(HostVerifier):
    """Calls processors and criteria once per decoding step, with plain's own [rows, columns].

    The walk goes on while every row has a child that was drafted. A finished row is fed pads, as in
    plain, and drafts them, so that it keeps nobody from going on. Without an eos criterion plain
    writes on in rows that have ended until all have: so long they count as live here.
    """

    name = "lockstep"

    def __init__(
        self,
        call: PreparedCall,
        outputs: RequestedOutputs,
        stream: ColumnStream,
        processes: Alone,
    ) -> None:
        super().__init__(processes)
        self._processors, self._criteria = call.processors, call.criteria
        self._do_sample, self._device = call.do_sample, call.input_ids.device
        self._outputs, self._stream = outputs, stream
        self._pad = call.pad if any(hasattr(c, "eos_token_id") for c in call.criteria) else None
        self._ended = np.zeros(1, bool)  # [rows] from the first step on

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Draft for finished rows the pads that they will be fed."""
        if self._pad is None or not rows.finished.any() or not draft.num_nodes:
            return draft
        return draft.with_chains(np.full(int(draft.depth.max()), self._pad), rows.finished)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        took_part, before = rows.live, rows.num_text
        tokens: list[np.ndarray] = []
        nodes = np.full(rows.num_rows, ROOT)
        paths: list[np.ndarray] = []
        every = torch.arange(rows.num_rows, device=logits.device)
        while True:
            at = torch.from_numpy(nodes + 1).to(logits.device)
            tokens.append(self._step(rows, logits[every, at]))
            if not rows.live.any():
                break
            reached = zip(nodes.tolist(), tokens[-1].tolist(), strict=True)
            children = [draft.child_of(row, *at) for row, at in enumerate(reached)]
            if None in children:
                break
            nodes = np.array(children)
            paths.append(nodes)
        return _verdict(tokens, paths, took_part, rows.finished.copy(), rows.num_text - before)

    def feed_pad(self, rows: Rows, row: int, logits: torch.Tensor) -> None:
        raise AssertionError("in lockstep finished rows are fed their pads in the steps")

    def _step(self, rows: Rows, logits: torch.Tensor) -> np.ndarray:
        """One decoding step of plain's: the tokens of all rows, [rows]."""
        ids = self._ids(rows)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._device)
        scores = self._processors(ids, raw)
        for row in range(rows.num_rows):
            self._outputs.choose(row, scores[row], raw[row])
        tokens = self._chosen(scores).to("cpu").numpy().astype(np.int64)
        if self._pad is not None:
            tokens[rows.finished] = self._pad
        for row, token in enumerate(tokens.tolist()):
            rows.emit(row, token)
        self._ended = self._asked(rows)
        if self._pad is not None or self._ended.all():
            for row in np.flatnonzero(self._ended & rows.live).tolist():
                rows.end(row)
        for row, token in enumerate(tokens.tolist()):
            self._stream.push(row, token)
        return tokens

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """The tokens after these scores: [rows, vocab] -> [rows]."""
        if self._do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        return scores.argmax(-1)

    def _asked(self, rows: Rows) -> np.ndarray:
        """Rows that the criteria have ended by now, [rows] bool."""
        going = np.broadcast_to(~self._ended, rows.num_rows).astype(np.int64)
        unfinished = torch.from_numpy(going).to(self._device)
        unfinished = unfinished & ~self._criteria(self._ids(rows), self._outputs.scores_so_far())
        ended: np.ndarray = unfinished.to("cpu").numpy() == 0
        return ended

    def _ids(self, rows: Rows) -> torch.Tensor:
        """The batch as plain holds it, [rows, columns]."""
        ids = np.stack([rows.ids(row) for row in range(rows.num_rows)])
        return torch.from_numpy(ids).to(self._device)


def _verdict(
    tokens: list[np.ndarray],  # [rows] of each decoding step
    paths: list[np.ndarray],  # [rows] of each decoding step but the last
    *state: np.ndarray,  # as `Verdict.from_rows` takes it
) -> Verdict:
    by_row = [path.tolist() for path in np.array(paths, np.int32).reshape(-1, len(state[0])).T]
    return Verdict.from_rows(np.stack(tokens, 1).tolist(), by_row, *state)

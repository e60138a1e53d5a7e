"""Lockstep: all rows take every step together, for what may look at the batch as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.generation.outputs import Records
from lookahead_hf.generation.streaming import ColumnStream
from lookahead_hf.rows import Rows


class Lockstep:
    """Calls processors and criteria once per decoding step, with plain's own [rows, columns].

    The walk goes on while every row has a child that was drafted. A finished row is fed pads, as in
    plain, and drafts them, so that it keeps nobody from going on. Without an eos criterion plain
    writes on in rows that have ended until all have: so long they count as live here.

    Attributes:
        so_far: What stands of a step that broke off; None outside of steps.
    """

    name = "lockstep"

    def __init__(
        self,
        processors: Any,
        criteria: Any,
        do_sample: bool,
        pad: int | None,
        device: torch.device,
        records: Records,
        stream: ColumnStream,
    ) -> None:
        """Take over a call's processors and criteria as `generate` prepared them."""
        self._processors, self._criteria = processors, criteria
        self._do_sample, self._device, self._records = do_sample, device, records
        self._stream = stream
        self._paths: list[np.ndarray] | None = None  # of the step in progress, [rows] each
        self._pad = pad if any(hasattr(c, "eos_token_id") for c in criteria) else None
        self._ended = np.zeros(1, bool)  # [rows] from the first step on

    def complete(self, rows: Rows, draft: DraftTree) -> DraftTree:
        """Draft for finished rows the pads that they will be fed."""
        if self._pad is None or not rows.finished.any() or not draft.num_nodes:
            return draft
        return draft.with_chains(np.full(int(draft.depth.max()), self._pad), rows.finished)

    def verify(self, rows: Rows, draft: DraftTree, logits: torch.Tensor) -> Verdict:
        """Decide one step and emit its tokens; see `Walk.verify`."""
        took_part, before = rows.live, rows.num_text
        tokens: list[np.ndarray] = []
        nodes = np.full(rows.num_rows, ROOT)
        self._paths = paths = list[np.ndarray]()
        every = torch.arange(rows.num_rows, device=logits.device)
        while True:
            at = torch.from_numpy(nodes + 1).to(logits.device)
            tokens.append(self._step(rows, logits[every, at]))
            if not rows.live.any():
                break
            children = [
                _child(draft, row, nodes[row], tokens[-1][row]) for row in range(len(nodes))
            ]
            if min(children) == ROOT:
                break
            nodes = np.array(children)
            paths.append(nodes)
        self._paths = None
        return _verdict(tokens, paths, took_part, rows.finished.copy(), rows.num_text - before)

    @property
    def so_far(self) -> Verdict | None:
        if self._paths is None:
            return None
        # As if the tokens after the paths were chosen: the cache holds what they would follow.
        chosen = [np.zeros(len(self._ended), np.int64)] * (1 + len(self._paths))
        return _verdict(chosen, self._paths, ~self._ended, self._ended)

    def _step(self, rows: Rows, logits: torch.Tensor) -> np.ndarray:
        """One decoding step of plain's: the tokens of all rows, [rows]."""
        ids = self._ids(rows)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._device)
        scores = self._processors(ids, raw)
        _take_edits(rows, ids)
        for row in range(rows.num_rows):
            self._records.choose(row, scores[row], raw[row])
        tokens = self._chosen(scores).to("cpu").numpy().astype(np.int64)
        if self._pad is not None:
            tokens[rows.finished] = self._pad
        chosen: list[int] = tokens.tolist()
        for row, token in enumerate(chosen):
            rows.emit(row, token)
        self._ended = self._asked(rows)
        if self._pad is not None or self._ended.all():
            for row in np.flatnonzero(self._ended & rows.live).tolist():
                rows.end(row)
        for row, token in enumerate(chosen):
            self._stream.push(row, token)
        return rows.last_tokens

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """The tokens after these scores: [rows, vocab] -> [rows]."""
        if self._do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        return scores.argmax(-1)

    def _asked(self, rows: Rows) -> np.ndarray:
        """Rows that the criteria have ended by now, [rows] bool."""
        going = np.broadcast_to(~self._ended, rows.num_rows).astype(np.int64)
        unfinished = torch.from_numpy(going).to(self._device)
        ids = self._ids(rows)
        unfinished = unfinished & ~self._criteria(ids, self._records.scores_so_far())
        _take_edits(rows, ids)
        ended: np.ndarray = unfinished.to("cpu").numpy() == 0
        return ended

    def _ids(self, rows: Rows) -> torch.Tensor:
        """The batch as plain holds it, [rows, columns]."""
        ids = np.stack([rows.ids(row) for row in range(rows.num_rows)])
        return torch.from_numpy(ids).to(self._device)


def _take_edits(rows: Rows, ids: torch.Tensor) -> None:  # [rows, columns]
    for row, edited in enumerate(ids.cpu()):
        rows.rewrite(row, edited)


def _verdict(
    tokens: list[np.ndarray],  # [rows] of each decoding step
    paths: list[np.ndarray],  # [rows] of each decoding step but the last
    live: np.ndarray,  # [rows] bool
    finished: np.ndarray,  # [rows] bool
    num_text: np.ndarray | None = None,  # [rows]
) -> Verdict:
    steps = np.arange(len(live) + 1)
    return Verdict(
        steps * len(tokens),
        np.stack(tokens, 1).reshape(-1),
        steps * len(paths),
        np.array(paths, np.int32).reshape(len(paths), len(live)).T.reshape(-1),
        live,
        finished,
        num_text,
    )


def _child(draft: DraftTree, row: int, node: int, token: int) -> int:
    """The drafted child of a node that holds the token, ROOT where there is none."""
    nodes = draft.row(row)
    found = np.flatnonzero((draft.parents[nodes] == node) & (draft.token_ids[nodes] == token))
    return int(found[0]) if len(found) else ROOT

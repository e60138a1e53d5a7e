"""Emits tokens: appends them to the rows, asks the stopping criteria and feeds the streamer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lookahead_hf.call.outputs import RequestedOutputs
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.call.stopping import RowStopping
from lookahead_hf.call.streaming import ColumnStream

if TYPE_CHECKING:
    from lookahead_hf.rows import Rows


class Emitter:
    """Appends tokens to rows, asks the stopping criteria after each, and then tells the streamer.

    Attributes:
        stopping: The stopping criteria.
        outputs: What the caller asked for beside the tokens.
        device: Where processors and criteria expect their tensors.
        is_heard: Whether there is a streamer.
        pad: The token that plain feeds finished rows, None if these go on with real tokens.
        first_row: The row in which the call's first text is; a queue puts texts into any row.
    """

    first_row = 0

    def __init__(
        self,
        stopping: RowStopping,
        outputs: RequestedOutputs,
        stream: ColumnStream,
        prompt: torch.Tensor,  # [rows, columns]
        pad: int | None = None,
    ) -> None:
        self.stopping, self._prompt, self.device = stopping, prompt, prompt.device
        self.outputs, self._stream, self._pad = outputs, stream, pad
        self.pad = pad if stopping.has_eos else None
        self.is_heard = stream.is_heard
        self._ended = np.zeros(1, bool)  # in lockstep, [rows] from the first token on

    def place(self, row: int) -> int:
        """Return which of the call's texts a row has."""
        return row - self.first_row

    def ids(self, rows: Rows, row: int) -> torch.Tensor:
        """Return a row as plain holds it, [1, columns].

        Before the first token that is the prompt itself, which a processor may edit in place.
        """
        if not rows.num_emitted[row]:
            return self._prompt[self.place(row) :][:1]
        return torch.from_numpy(rows.ids(row))[None].to(self.device)

    def all_ids(self, rows: Rows) -> torch.Tensor:
        """Return the batch as plain holds it, [rows, columns]; all rows have equally many."""
        if not rows.num_emitted.any():
            return self._prompt
        ids = np.stack([rows.ids(row) for row in range(rows.num_rows)])
        return torch.from_numpy(ids).to(self.device)

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep what a row's next token is chosen by: scores and logits, [vocab] float32."""
        self.outputs.choose(self.place(row), scores, logits)

    def emit(self, rows: Rows, row: int, token: int, stops: bool | None = None) -> bool:
        """Append a token to a row and return whether the text ends with it.

        The criteria are always asked; if `stops` is given, it counts instead of their answer.
        """
        rows.emit(row, token)
        asked = self._asks(rows, row, token)
        stops = asked if stops is None else stops
        if stops:
            rows.end(row)
        self._stream.push(row, token, stops)
        return stops

    def emit_to_all(self, rows: Rows, tokens: list[int], ended: np.ndarray | None = None) -> None:
        """Append a token to every row as a decoding step of plain does, finished rows included.

        The criteria are always asked; if `ended`, [rows] bool, is given, it counts instead.
        """
        for row, token in enumerate(tokens):
            rows.emit(row, token)
        asked = self._asks_all(rows)
        self._ended = asked if ended is None else ended
        if self.pad is not None or self._ended.all():
            rows.end(self._ended & rows.live)
        for row, token in enumerate(tokens):
            self._stream.push(row, token)

    def feed_pad(self, rows: Rows, row: int) -> None:
        """Append a pad to a finished row."""
        rows.emit(row, self._pad or 0)

    def num_shown(self, rows: Rows) -> int:
        """Return how many generated columns plain would have reached by now."""
        # A streamer that raised did so at a column that plain had drawn, too.
        return self._stream.num_begun if self.is_heard else rows.num_columns

    def _asks(self, rows: Rows, row: int, token: int) -> bool:
        """Ask the criteria about a row, whose ids they may edit if their classes are unknown."""
        columns, scores = len(rows.ids(row)), self.outputs.scores_so_far
        if self.stopping.all_known:
            return self.stopping.stops(token, columns, lambda: self.ids(rows, row), scores)
        ids = self.ids(rows, row)
        stops = self.stopping.stops(token, columns, lambda: ids, scores)
        rows.rewrite(row, ids[0])
        return stops

    def _asks_all(self, rows: Rows) -> np.ndarray:
        """Ask the criteria about the whole batch: rows that they have ended so far, [rows] bool."""
        ids = self.all_ids(rows)
        going = np.broadcast_to(~self._ended, rows.num_rows)
        ended = self.stopping.ended(ids, going, self.outputs.scores_so_far())
        take_edits(rows, ids)
        return ended


def take_edits(rows: Rows, ids: torch.Tensor) -> None:  # [rows, columns]
    """Take over what processors or criteria have written into the ids of a batch."""
    for row, edited in enumerate(ids.cpu()):
        rows.rewrite(row, edited)


def build_emitter(call: PreparedCall, outputs: RequestedOutputs, stream: ColumnStream) -> Emitter:
    """Return the emitter of a call."""
    stopping = RowStopping(call.criteria, call.num_rows)
    return Emitter(stopping, outputs, stream, call.input_ids, call.pad)

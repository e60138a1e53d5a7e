"""Emits tokens: appends them to the rows, asks the criteria, feeds the streamer, keeps outputs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.call.stopping import RowStopping
from lookahead_hf.rows import Rows

Layers = tuple[torch.Tensor, ...]

_ROWS = -3
"""The axis of the rows: states are [..., rows, tokens, hidden], since Gemma 3n keeps several."""


class RequestedOutputs:
    """Scores, logits and hidden states of every emitted token, as plain returns them.

    Rows advance by different counts, so everything is kept by row and put together at the end.

    Attributes:
        chooses: Whether the scores or logits behind each choice are kept.
        observes: Whether hidden states are kept.
    """

    def __init__(
        self, generation_config: Any, num_rows: int, encoder_outputs: Any | None = None
    ) -> None:
        """Read from a prepared generation config what to keep, also of an encoder, if any."""
        c = generation_config
        returned = bool(c.return_dict_in_generate)
        chosen = {"scores": returned and c.output_scores, "logits": returned and c.output_logits}
        self._chosen: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in range(num_rows)] for name, wanted in chosen.items() if wanted
        }
        self._joined: dict[str, list[torch.Tensor]] = {name: [] for name in self._chosen}
        self._encoder, self._name = encoder_outputs, "hidden_states"
        if encoder_outputs is not None:
            self._name = "decoder_hidden_states"
        self._prefill: Layers = ()
        self._states: list[list[Layers]] = [[] for _ in range(num_rows)]
        self.chooses = bool(self._chosen)
        self.observes = returned and bool(c.output_hidden_states)

    def __bool__(self) -> bool:
        return self.chooses or self.observes

    def scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        """Return the `scores` that plain passes to stopping criteria, for rows in lockstep."""
        return self._columns("scores") if "scores" in self._chosen else None

    def choose(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep what a row's token is chosen by: processed scores and logits, [vocab] float32."""
        for name, value in (("scores", scores), ("logits", logits)):
            if name in self._chosen:
                self._chosen[name][row].append(value)

    def prefill(self, outputs: Any) -> None:
        """Keep the hidden states of the prompt's forward, if they are asked for."""
        if self.observes:
            self._prefill = getattr(outputs, self._name)

    def observe(self, row: int, tokens: list[int], outputs: Any) -> None:
        """Keep a forward's hidden states of a row's kept tokens, places in the block."""
        layers = getattr(outputs, self._name)
        for at in (slice(token, token + 1) for token in tokens):
            self._states[row].append(tuple(states[..., row, at, :].clone() for states in layers))

    def fields(self, num_columns: int) -> dict[str, Any]:
        """Return the requested fields of the output, one entry per generated column."""
        fields: dict[str, Any] = {name: self._columns(name)[:num_columns] for name in self._chosen}
        if self.observes:
            columns = list(zip(*self._states, strict=False))[: num_columns - 1]
            steps = (zip(*rows, strict=True) for rows in columns)  # by layer, [rows] each
            layers = (tuple(torch.stack(states, _ROWS) for states in step) for step in steps)
            fields[self._name] = (self._prefill, *layers)
            if self._encoder is not None:
                fields["encoder_hidden_states"] = self._encoder.get("hidden_states")
        return fields

    def _columns(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the entries of all rows by column, [rows, vocab] each; a column is joined once."""
        rows, joined = self._chosen[name], self._joined[name]
        for column in range(len(joined), min(map(len, rows))):
            whole = torch.stack([row[column] for row in rows])
            for row, entry in zip(rows, whole, strict=True):
                row[column] = entry  # a view, which frees the row's own tensor
            joined.append(whole)
        return tuple(joined)


class ColumnStream:
    """Feeds a streamer plain's columns, one `put` each, from rows that advance by different counts.

    A column is put as soon as every row has a token for it; a finished row contributes pads.
    """

    def __init__(
        self,
        streamer: Any | None,
        num_rows: int,
        pad_token_id: int | None,
        spent: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`spent`: called with the seconds that the streamer took for a column."""
        self._streamer, self._spent = streamer, spent
        self.is_heard = streamer is not None  # whether there is a streamer
        self.num_begun = 0  # columns that were put, including one at which the streamer raised
        self._pad = pad_token_id
        self._waiting: list[deque[int]] = [deque() for _ in range(num_rows)]
        self._finished = [False] * num_rows

    def prompt(self, input_ids: torch.Tensor) -> None:
        """Put the prompt, [rows, columns]."""
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())

    def push(self, row: int, token: int, is_last: bool = False) -> None:
        """Take the next token of a row, which may be the `is_last` of its text."""
        if self._streamer is not None:
            self._waiting[row].append(token)
            self._finished[row] = is_last
            self._flush()

    def end(self) -> None:
        """End the stream; all rows have finished."""
        if self._streamer is not None:
            self._streamer.end()

    def _flush(self) -> None:
        assert self._streamer is not None
        while any(self._waiting) and all(
            tokens or done for tokens, done in zip(self._waiting, self._finished, strict=True)
        ):
            column = [tokens.popleft() if tokens else self._pad for tokens in self._waiting]
            start = time.perf_counter()
            self.num_begun += 1
            self._streamer.put(torch.tensor(column))
            self._spent(time.perf_counter() - start)


class HeldStreamer:
    """Holds what transformers puts into a streamer until our decoding takes over.

    `generate` puts the prompt before it calls a strategy. Our decoding puts the prompt itself, once
    it is sure to serve the call. If a `generate` never calls the strategy, everything is passed on.
    """

    def __init__(self, streamer: Any, before_text: Callable[[], None]) -> None:
        """`before_text`: called when a token comes, before it is passed on."""
        self._streamer, self._before_text = streamer, before_text
        self._held: list[Any] = []
        self._is_open = False

    def put(self, value: Any) -> None:
        """Hold the first value; a second one means that our decoding does not take over."""
        if getattr(value, "ndim", 0) == 1:  # tokens, where prompts are [rows, columns]
            self._before_text()
        self._held.append(value)
        if len(self._held) > 1 or self._is_open:
            self._pass_on()

    def end(self) -> None:
        """Pass on the end of a text that was decoded elsewhere; another text may follow."""
        self._pass_on()
        self._streamer.end()
        self._is_open = False

    def drop(self) -> None:
        """Forget what was held: our decoding takes over."""
        self._held.clear()

    def _pass_on(self) -> None:
        self._is_open = True
        while self._held:
            self._streamer.put(self._held.pop(0))


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

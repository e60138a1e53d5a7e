"""Feeds a streamer as plain `generate` does: the prompt, then one token per row at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class ColumnStream:
    """Feeds a streamer plain's columns, one `put` each, from rows that advance by different counts.

    A column is put as soon as every row has a token for it; a finished row contributes pads.

    Attributes:
        is_heard: Whether there is a streamer.
        num_begun: Columns that were put, including one at which the streamer raised.
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
        self.is_heard = streamer is not None
        self.num_begun = 0
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

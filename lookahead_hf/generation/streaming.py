"""Feeds a streamer as plain `generate` does: the prompt, then one token per row at a time."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class ColumnStream:
    """Turns rows that advance by different counts into plain's columns, one `put` per column.

    A column goes out as soon as every row has a token for it; a finished row gives pads.

    Attributes:
        is_heard: Whether there is a streamer.
        num_begun: Columns that were put, also one at which the streamer has raised.
        seconds: What the streamer has taken for them.
    """

    def __init__(self, streamer: Any | None, num_rows: int, pad_token_id: int | None) -> None:
        self._streamer = streamer
        self.is_heard = streamer is not None
        self.num_begun, self.seconds = 0, 0.0
        self._pad = pad_token_id
        self._waiting: list[deque[int]] = [deque() for _ in range(num_rows)]
        self._finished = [False] * num_rows

    def prompt(self, input_ids: torch.Tensor) -> None:
        """Give the prompt, [rows, columns]."""
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())

    def push(self, row: int, token: int, is_last: bool = False) -> None:
        """Give the next token of a row, or its last."""
        if self._streamer is not None:
            self._waiting[row].append(token)
            self._finished[row] = is_last
            self._flush()

    def end(self) -> None:
        """Say that the call has ended normally: what still waits goes out first."""
        if self._streamer is not None:
            self._finished = [True] * len(self._finished)
            self._flush()
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
            self.seconds += time.perf_counter() - start

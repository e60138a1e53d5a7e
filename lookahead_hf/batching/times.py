"""Shares the time of a run's steps among its requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lookahead_hf.generation.recorder import StatsRecorder
from lookahead_hf.trace.steps import PARTS

_PREFILL, _FORWARD = PARTS.index("prefill"), PARTS.index("forward")


class RowTimes:
    """Time and fed tokens of the text in each row, which add up to those of the run.

    The time of a forward is shared by the tokens that each row feeds, and is prefill for a row that
    reads its prompt. Other times are shared equally among the rows that decode. If several requests
    share a prompt, the one that read it is charged for it.
    """

    def __init__(self, num_rows: int, recorder: StatsRecorder) -> None:
        self._recorder = recorder
        self._spent = np.zeros((num_rows, len(PARTS)))
        self._shared = np.zeros(len(PARTS))  # what of the recorder's times is in `_spent`
        self._fed, self._fed_in_steps = np.zeros((2, num_rows), np.int64)

    @contextmanager
    def phase(self, row: int, name: str) -> Iterator[None]:
        """Time a block as a phase of one row alone."""
        spent_by_all, index = self._recorder.milliseconds, PARTS.index(name)
        before = spent_by_all[name]
        try:
            with self._recorder.phase(name):
                yield
        finally:
            spent = spent_by_all[name] - before
            self._spent[row, index] += spent
            self._shared[index] += spent

    def read_alone(self, row: int, num_tokens: int) -> None:
        """Count the tokens of a prompt that was read outside of steps."""
        self._fed[row] += num_tokens

    def share(self, live: np.ndarray, step_tokens: np.ndarray) -> None:
        """Share what a step took.

        Args:
            live: Rows that decoded in it, [rows] bool.
            step_tokens: Tokens that all steps so far have fed for each row, [rows].
        """
        fed, self._fed_in_steps = step_tokens - self._fed_in_steps, step_tokens.copy()
        self._fed += fed
        total = np.array([self._recorder.milliseconds[name] for name in PARTS])
        spent, self._shared = total - self._shared, total
        by_tokens = fed / fed.sum()
        equally = live / live.sum() if live.any() else by_tokens
        of_forward = by_tokens * spent[_FORWARD]
        spent[_FORWARD] = 0
        self._spent += np.outer(equally, spent)
        self._spent[:, _FORWARD] += np.where(live, of_forward, 0)
        self._spent[:, _PREFILL] += np.where(live, 0, of_forward)

    def of_row(self, row: int) -> dict[str, Any]:
        """Return the arguments of `StatsRecorder.of_row` that are known here."""
        milliseconds = dict(zip(PARTS, self._spent[row].tolist(), strict=True))
        return {"milliseconds": milliseconds, "num_fed": int(self._fed[row])}

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        self._spent[row] = self._fed[row] = 0

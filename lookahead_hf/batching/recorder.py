"""Counts and times the steps of requests that come and go, for every request apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lookahead_hf.draft import DraftTree, Verdict, place_in_row
from lookahead_hf.generation.recorder import StatsRecorder, record_of, widths
from lookahead_hf.stats import PHASES, RowStats, SpeculativeStats

_PREFILL, _FORWARD = PHASES.index("prefill"), PHASES.index("forward")


class RowRecorder(StatsRecorder):
    """Gives every request statistics of its own, which add up to those of the run.

    A step counts as a step of every row that decodes in it. The time of its forward is shared by
    the tokens that each row feeds, which is prefill for a row that reads its prompt, and other
    times equally among the rows that decode. Of texts with one prompt, the first has its prefill.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._histograms: list[Counter[int]] = [Counter() for _ in range(num_rows)]
        self._sizes: list[Counter[int]] = [Counter() for _ in range(num_rows)]
        self._widths, self._moved_in, self._fed = np.zeros((3, num_rows), np.int64)
        self._spent = np.zeros((num_rows, len(PHASES)))
        self._counted = np.zeros(len(PHASES))  # what of the times is in `_spent`
        self._fed_in_steps = np.zeros(num_rows, np.int64)  # what of the tokens is in `_fed`
        self._live = np.zeros(num_rows, bool)  # in the latest step

    @property
    def _counts(self) -> tuple[np.ndarray, ...]:
        """Steps, drafted, accepted, moved and fed tokens, and the widest draft, [rows] each."""
        of_steps = self._row_steps, self._drafted, self._accepted
        return *of_steps, self._moved_in, self._fed, self._widths

    @contextmanager
    def phase_of(self, row: int, name: str) -> Iterator[None]:
        """Time the block as a phase of one row alone, see `phase`."""
        before, index = self.milliseconds[name], PHASES.index(name)
        try:
            with self.phase(name):
                yield
        finally:
            spent = self.milliseconds[name] - before
            self._spent[row, index] += spent
            self._counted[index] += spent

    def fed(self, row: int, num_tokens: int) -> None:
        """Count the tokens of a prompt that ran alone."""
        self._fed[row] += num_tokens

    def observe(self, draft: DraftTree, verdict: Verdict, num_moved: int = 0) -> None:
        super().observe(draft, verdict, num_moved)
        drafted, accepted = np.diff(draft.row_offsets), verdict.num_accepted
        self._live = verdict.live.copy()
        for row in np.flatnonzero(self._live).tolist():
            self._histograms[row][int(accepted[row])] += 1
            self._sizes[row][int(drafted[row])] += 1
        self._widths = np.maximum(self._widths, widths(draft))
        moved = verdict.path != place_in_row(verdict.path_offsets)
        np.add.at(self._moved_in, np.repeat(np.arange(len(accepted)), accepted), moved)

    def settle(self, step_tokens: np.ndarray) -> None:
        """Share the time since the last call among the rows of the latest step.

        `step_tokens`, [rows], counts the tokens that all steps so far have fed for each row.
        """
        fed, self._fed_in_steps = step_tokens - self._fed_in_steps, step_tokens.copy()
        if not fed.any():
            return  # there was no step
        self._fed += fed
        total = np.array([self.milliseconds[name] for name in PHASES])
        spent, self._counted = total - self._counted, total
        by_tokens = fed / fed.sum()
        equally = self._live / self._live.sum() if self._live.any() else by_tokens
        of_forward = by_tokens * spent[_FORWARD]
        spent[_FORWARD] = 0
        self._spent += np.outer(equally, spent)
        self._spent[:, _FORWARD] += np.where(self._live, of_forward, 0)
        self._spent[:, _PREFILL] += np.where(self._live, 0, of_forward)

    def of_row(self, row: int, num_emitted: int, **others: Any) -> SpeculativeStats:
        """Return the record of the text of a row, which has so many tokens; see `finish`."""
        steps, drafted, accepted, moved, fed, width = (int(each[row]) for each in self._counts)
        return record_of(
            [RowStats(steps, num_emitted, drafted, accepted)],
            dict(zip(PHASES, self._spent[row].tolist(), strict=True)),
            self._histograms[row],
            self._sizes[row],
            num_steps=steps,
            num_moved=moved,
            max_width=width,
            num_fed=fed,
            **others,
        )

    def free(self, row: int) -> None:
        """Begin to count another text in a row."""
        for counts in (*self._counts, self._spent):
            counts[row] = 0
        self._histograms[row], self._sizes[row] = Counter(), Counter()

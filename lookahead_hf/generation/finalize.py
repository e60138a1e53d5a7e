"""How a call ends, or breaks off: texts that have ended catch up, and the cache goes back."""

from __future__ import annotations

from typing import Any

import numpy as np

from lookahead_hf.cache.column_map import seen_slots
from lookahead_hf.distributed.coordinator import Alone
from lookahead_hf.generation.outputs import Records
from lookahead_hf.rows import Rows
from lookahead_hf.runner.host import Runner
from lookahead_hf.verification.select import Engine


class Ending:
    """Leaves caches, records and other processes as plain `generate` does."""

    def __init__(
        self,
        rows: Rows,
        target: Runner,
        engine: Engine,
        records: Records,
        processes: Alone,
        pad: int | None,
        returns_cache: bool,
    ) -> None:
        """`returns_cache`: whether the caller sees the cache, wherever the call ends."""
        self._rows, self._target, self._engine = rows, target, engine
        self._records, self._processes = records, processes
        self._pad, self._returns_cache = pad, returns_cache

    @property
    def num_columns(self) -> int:
        """Columns that were generated; without a pad token the shortest row's."""
        emitted = self._rows.num_emitted
        return int(emitted.max() if self._pad is not None else emitted.min())

    def reached(self) -> Any:
        """All texts have ended: the cache as plain leaves it, None where nobody sees it."""
        columns = self.num_columns
        if self._returns_cache or self._records or self._processes.runs_same:
            self._catch_up(columns)
        while self._processes.others_go_on():
            self._run_for_others()
        return self._hand_back(columns - 1) if self._returns_cache else None

    def broke_off(self) -> None:
        """Hand back a cache of the caller's after an exception, with the whole steps that it holds.

        The step in progress is not part of it, and the row that got least far sets its length. A
        later call feeds the tokens that the cache lacks.
        """
        try:
            if self._returns_cache and self._target.cache is not None:
                self._hand_back(self._target.num_fed)
        finally:
            self._processes.broke_off()

    def _short(self, columns: int) -> np.ndarray:
        """Pads, and the last token before them, that ended rows lack in the cache, [rows]."""
        rows = self._rows
        return np.where(rows.finished, np.maximum(columns - rows.num_emitted, 0), 0)

    def _catch_up(self, columns: int) -> None:
        """Feed ended rows pads until the last row's end, as plain does at every step."""
        short = self._short(columns)
        if not short.any():
            return
        self._processes.step()
        outputs = self._feed(short, columns)
        for row in np.flatnonzero(short).tolist():
            observe(self._records, self._target, row, list(range(short[row])), outputs)
            for index in range(short[row]):
                self._engine.feed_pad(self._rows, row, outputs.logits[row, index])
        self._target.keep(short)

    def _feed(self, short: np.ndarray, columns: int) -> Any:
        """One forward over the tokens that ended rows lack."""
        pads = [
            [self._rows.last_token(row), *[self._pad or 0] * (count - 1)][:count]
            for row, count in enumerate(short.tolist())
        ]
        longest_fed = columns - 2
        return self._target.feed(pads, np.minimum(self._rows.num_emitted - 1, longest_fed))

    def _run_for_others(self) -> None:
        """A forward of which nothing is kept."""
        last = [[self._rows.last_token(row)] for row in range(self._rows.num_rows)]
        self._target.feed(last, self._rows.num_emitted - 1)

    def _hand_back(self, num_fed: int) -> Any:
        cache = self._target.cache
        assert cache is not None
        return cache.hand_back(cache.num_columns + num_fed)


def observe(records: Records, target: Runner, row: int, kept: list[int], outputs: Any) -> None:
    """Keep what the caller asked to see of tokens of a block that a row keeps, root first."""
    if records.observes:
        assert target.cache is not None
        records.observe(row, kept, outputs, seen_slots(target.cache, row, kept))

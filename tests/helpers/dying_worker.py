"""A worker of Ray Data that is killed once, in the middle of a block."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lookahead_hf
from lookahead_hf.ray import Worker

MARK = "LOOKAHEAD_HF_TEST_KILLED"
"""The variable of the environment that names a file, which tells that a worker was killed."""

TEXTS = 5
"""Texts of its block that the worker has written by then."""


class DyingWorker(Worker):
    """Dies in the block that has row 100, unless another one has done so before."""

    def __call__(self, rows: Any) -> Any:
        mark = Path(os.environ[MARK])
        if 100 in rows["id"].to_pylist() and not mark.exists():
            written: list[Any] = []

            def count(stats: Any) -> None:
                written.append(stats)
                if len(written) == TEXTS:
                    mark.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGKILL)

            lookahead_hf.on_stats(self._model, count)
        return super().__call__(rows)

"""The end of a call, also by an exception: finished rows catch up; the cache is handed back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf import compat
from lookahead_hf.cache.adopt import AdoptedCache

if TYPE_CHECKING:
    from lookahead_hf.generation.session import BatchSession
    from lookahead_hf.runner.outputs import StepOutputs


def finish(session: BatchSession, columns: int) -> Any:
    """Leave cache, outputs and other processes as plain does after so many generated columns.

    Returns the cache, None if the caller does not see it.
    """
    returned, processes = session.call.returns_cache, session.processes
    vocab = compat.text_config(session.call.model).vocab_size
    raises = not 0 <= (session.call.pad or 0) < vocab  # as plain does where it feeds such a pad
    if returned or session.outputs or processes.runs_same or raises:
        _catch_up(session, columns)
    while processes.others_go_on():
        rows = session.rows
        last = [[rows.last_token(row)] for row in range(rows.num_rows)]
        session.runner.feed(last, rows.num_emitted - 1)  # of which nothing is kept
    return session.runner.hand_back(columns - 1) if returned else None


def break_off(session: BatchSession) -> None:
    """Hand back a cache of the caller's after an exception.

    It holds whole steps only and ends where the slowest row ends. A later call feeds the tokens
    that it lacks.
    """
    try:
        if session.call.returns_cache and session.runner.beginning is not None:
            session.runner.hand_back(int(session.runner.fed.min()))
    finally:
        session.processes.broke_off()


def observe(session: BatchSession, row: int, kept: list[int], step: StepOutputs) -> None:
    """Keep the requested outputs of the tokens that a row keeps, by their places, root first."""
    if session.outputs.observes:
        assert isinstance(session.runner.cache, AdoptedCache)
        num_layers = session.outputs.num_attending(step.of_model)
        slots = session.runner.cache.seen_slots(row, kept, num_layers)
        session.outputs.observe(row, kept, step.of_model, slots)


def _catch_up(session: BatchSession, columns: int) -> None:
    """Feed finished rows the pads that plain feeds them until the last row ends."""
    rows, runner = session.rows, session.runner
    lacking = np.where(rows.finished, np.maximum(columns - rows.num_emitted, 0), 0)  # [rows]
    if not lacking.any():
        return
    session.processes.step()
    pads = [
        [rows.last_token(row), *[session.call.pad or 0] * (count - 1)][:count]
        for row, count in enumerate(lacking.tolist())
    ]
    outputs = runner.feed(pads, np.minimum(rows.num_emitted - 1, columns - 2))
    runner.keep(lacking)
    for row in np.flatnonzero(lacking).tolist():
        observe(session, row, list(range(lacking[row])), outputs)
        for index in range(lacking[row]):
            session.verifier.feed_pad(rows, row, outputs.logits[row, index])

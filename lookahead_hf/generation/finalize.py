"""How a call ends or breaks off: finished rows catch up, and the cache is handed back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_hf import compat
from lookahead_hf.cache.column_map import seen_slots

if TYPE_CHECKING:
    from lookahead_hf.generation.session import DecodingSession
    from lookahead_hf.runner.outputs import StepOutputs


def finish(session: DecodingSession, columns: int) -> Any:
    """Leave cache, outputs and other processes as plain does after so many generated columns.

    Returns:
        The cache as plain leaves it, None where the caller does not see it.
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


def break_off(session: DecodingSession) -> None:
    """Hand back a cache of the caller's after an exception, with the whole steps that it holds.

    The cache lacks the step in progress, and it ends where the row that got least far ends. A later
    call feeds the tokens that it lacks.
    """
    try:
        if session.call.returns_cache and session.runner.has_cache:
            session.runner.hand_back(int(session.runner.fed.min()))
    finally:
        session.processes.broke_off()


def observe(session: DecodingSession, row: int, kept: list[int], step: StepOutputs) -> None:
    """Keep what the caller asked to see of the tokens that a row keeps of a step.

    `kept` holds the places of these tokens in the block, root first.
    """
    if session.outputs.observes:
        slots = seen_slots(session.runner.cache, row, kept)
        session.outputs.observe(row, kept, step.of_model, slots)


def _catch_up(session: DecodingSession, columns: int) -> None:
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

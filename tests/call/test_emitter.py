"""Tokens reach rows, criteria and streamer in plain's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lookahead_hf.call.emitter import Emitter
from lookahead_hf.call.outputs import RequestedOutputs
from lookahead_hf.call.stopping import RowStopping
from lookahead_hf.call.streaming import ColumnStream
from lookahead_hf.rows import Rows
from tests.helpers.fakes import Recorder
from tests.helpers.models import tiny


class Shortens(StoppingCriteria):
    """Halves the newest token, and ends a text at 1."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.asked.append(input_ids[:, -1].tolist())
        input_ids[:, -1] //= 2
        return input_ids[:, -1] == 1


def emitter(criteria: list[StoppingCriteria], rows: Rows, streamer: Any = None) -> Emitter:
    config = tiny("llama").generation_config
    return Emitter(
        RowStopping(StoppingCriteriaList(criteria), rows.num_rows),
        RequestedOutputs(config, rows.num_rows),
        ColumnStream(streamer, rows.num_rows, 0),
        torch.from_numpy(np.stack([rows.ids(row) for row in range(rows.num_rows)])),
        pad=0,
    )


def test_a_token_is_shown_once_every_row_has_one() -> None:
    rows, heard = Rows(np.full((2, 1), 5)), Recorder()
    emits = emitter([EosTokenCriteria(9), MaxLengthCriteria(3)], rows, heard)
    assert not emits.emit(rows, 0, 7)
    assert emits.emit(rows, 0, 8)  # the third column
    assert (heard.events, emits.num_shown(rows)) == ([], 0)
    assert emits.emit(rows, 1, 9)
    assert (heard.events, emits.num_shown(rows)) == ([[7, 9], [8, 0]], 2)
    assert rows.finished.all()
    emits.feed_pad(rows, 1)
    assert rows.emitted(1).tolist() == [9, 0] and rows.num_text.tolist() == [2, 1]


@pytest.mark.parametrize("told", [None, True, False])
def test_criteria_are_asked_even_if_another_process_decides(told: bool | None) -> None:
    rows, criterion = Rows(np.full((1, 1), 5)), Shortens()
    stops = emitter([criterion], rows).emit(rows, 0, 2, told)
    assert stops == rows.finished[0] == (told is not False)
    assert (criterion.asked, rows.last_token(0)) == ([[2]], 1)


@pytest.mark.parametrize("told", [None, np.array([False, False])])
def test_all_rows_take_a_step(told: np.ndarray | None) -> None:
    rows, criterion = Rows(np.full((2, 1), 5)), Shortens()
    emits = emitter([EosTokenCriteria(9), criterion], rows)
    emits.emit_to_all(rows, [8, 3], told)
    assert (criterion.asked, rows.last_tokens.tolist()) == ([[8, 3]], [4, 1])
    assert rows.finished.tolist() == [False, told is None]
    emits.emit_to_all(rows, [8, 0])
    assert rows.finished.tolist() == [False, told is None]
    assert rows.num_text.tolist() == [2, 1 if told is None else 2]

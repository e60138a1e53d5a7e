"""Rows that one text after another takes."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.rows import Rows


def test_a_row_takes_one_text_after_another() -> None:
    rows = Rows.without_texts(3)
    assert not rows.live.any()
    assert rows.lengths.tolist() == [1, 1, 1]
    rows.take(1, np.array([5, 6, 7]))
    rows.emit(1, 8)
    rows.emit(1, 9)
    assert rows.num_emitted.tolist() == [0, 2, 0]
    assert rows.context(1).tolist() == rows.ids(1).tolist() == [5, 6, 7, 8, 9]
    assert rows.live.tolist() == [False, True, False]
    assert rows.last_tokens.tolist() == [0, 9, 0]
    assert rows.last_two().tolist() == [[-1, 0], [8, 9], [-1, 0]]
    assert rows.last_two(np.array([0, 4, 1])).tolist() == [[-1, 0], [-1, 5], [-1, -1]]
    assert (rows.lengths.tolist(), rows.prompt_columns) == ([1, 5, 1], 3)
    copy = rows.copied()
    rows.end(1)
    assert rows.finished.all() and not copy.finished.all()
    assert rows.num_text.tolist() == [0, 2, 0]
    rows.free(1)
    assert rows.num_emitted.tolist() == rows.num_text.tolist() == [0, 0, 0]
    assert copy.emitted(1).tolist() == [8, 9]
    rows.take(1, np.arange(100))
    assert (rows.prompt_length(1), rows.last_token(1), rows.emitted(1).size) == (100, 99, 0)


def test_pads_are_columns_but_no_context() -> None:
    rows = Rows(np.array([[0, 0, 7], [4, 5, 6]]), np.array([[0, 0, 1], [1, 1, 1]], bool))
    rows.emit(0, 8)
    assert rows.ids(0).tolist() == [0, 0, 7, 8] and rows.context(0).tolist() == [7, 8]
    rows.rewrite(0, torch.tensor([0, 0, 3, 9]))
    assert rows.context(0).tolist() == [3, 9] and rows.lengths.tolist() == [2, 3]

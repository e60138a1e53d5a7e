"""Rows that are taken by one text after another."""

from __future__ import annotations

import numpy as np

from lookahead_hf.batching.rows import RefilledRows


def test_rows_count_what_their_texts_count() -> None:
    rows = RefilledRows(3)
    assert not rows.live.any()
    assert rows.num_fed.tolist() == [0, 0, 0]
    rows.take(1, np.array([5, 6, 7]), 4)
    rows.texts[1].emit(0, 8)
    rows.emit(1, 9)
    assert rows.num_emitted.tolist() == [0, 2, 0]
    assert rows.context(1).tolist() == rows.ids(1).tolist() == [5, 6, 7, 8, 9]
    assert rows.live.tolist() == [False, True, False]
    assert rows.last_tokens.tolist() == [0, 9, 0]
    assert rows.last_two().tolist() == [[-1, 0], [8, 9], [-1, 0]]
    assert rows.last_two(np.array([0, 4, 1])).tolist() == [[-1, 0], [-1, 5], [-1, -1]]
    assert rows.num_fed.tolist() == [0, 4, 0] and rows.most_new.tolist() == [0, 4, 0]
    copy = rows.copied()
    rows.texts[1].end(0)
    assert rows.finished.all() and not copy.finished.all()
    rows.free(1)
    assert rows.num_emitted.tolist() == rows.most_new.tolist() == [0, 0, 0]
    assert copy.emitted(1).tolist() == [8, 9]

"""What goes round in a step: every verdict and draft comes out as it went in."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lookahead_hf.distributed import message
from lookahead_hf.draft import ROOT, DraftTree, Verdict
from lookahead_hf.rows import Rows

MOST = 6


def some_tree(chance: random.Random, num_rows: int) -> DraftTree:
    rows = []
    for _ in range(num_rows):
        count = chance.randint(0, MOST)
        parents = [chance.randint(ROOT, node - 1) for node in range(count)]
        rows.append(([chance.randrange(2**31) for _ in range(count)], parents))
    return DraftTree.from_rows(rows)


def some_verdict(chance: random.Random, rows: Rows) -> Verdict:
    """Rows that emit up to a whole path, some of which end, and rows that had ended before."""
    live = rows.live
    emitted: list[list[int]] = []
    paths: list[list[int]] = []
    for row in range(rows.num_rows):
        accepted = chance.randint(0, MOST) if live[row] else 0
        paths.append(sorted(chance.sample(range(MOST), accepted)))
        emitted.append([chance.randrange(2**31) for _ in range((accepted + 1) * bool(live[row]))])
        for token in emitted[row]:
            rows.emit(row, token)
        if live[row] and chance.random() < 0.3:
            rows.end(row)
    return Verdict.from_rows(emitted, paths, live, rows.finished.copy())


@pytest.mark.parametrize("seed", range(20))
def test_a_message_says_what_was_put_in(seed: int) -> None:
    chance = random.Random(seed)
    rows = Rows(np.ones((chance.randint(1, 4), 3), np.int64))
    for _ in range(3):
        verdict, draft = some_verdict(chance, rows), some_tree(chance, rows.num_rows)
        sent = message.packed(rows, verdict, draft, MOST)
        assert sent.shape == message.shape(rows.num_rows, MOST) and sent.dtype == np.int32
        received = message.unpacked(sent)
        assert received is not None
        for row in range(rows.num_rows):
            assert received.tokens[row] == verdict.emitted(row).tolist()
            assert received.paths[row] == verdict.accepted(row).tolist()
        assert received.finished.tolist() == rows.finished.tolist()
        assert received.num_text.tolist() == rows.num_text.tolist()
        for name in ("row_offsets", "token_ids", "parents", "depth"):
            assert getattr(received.draft, name).tolist() == getattr(draft, name).tolist()


def test_a_message_that_breaks_off_says_nothing_else() -> None:
    sent = message.broken_off(2, MOST)
    assert sent.shape == message.shape(2, MOST)
    assert message.unpacked(sent) is None

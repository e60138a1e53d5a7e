"""What a call in lockstep counts: live rows only, though finished ones are fed pads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LogitsProcessorList

from lookahead_hf import SpeculativeConfig
from lookahead_hf.draft import Verdict
from tests.helpers.calls import GREEDY
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import continuations, right
from tests.helpers.users_parts import Unknown


@pytest.mark.parametrize("drafters", ["script", ("ngram",), ("recycling",)])
def test_finished_rows_are_not_counted(drafters: Any) -> None:
    model = tiny("llama")
    call = {"input_ids": prompt(3, seed=4), **GREEDY, "max_new_tokens": 60}
    call["logits_processor"] = LogitsProcessorList([Unknown()])
    text = continuations(model.generate(**call), 12)[0]
    call["eos_token_id"] = next(token for token in text if 8 < text.index(token) < 20)
    config = SpeculativeConfig(drafters=drafters, budget=8) if drafters != "script" else None
    stats = compared(model, lambda: dict(call), 12, right(5), config).stats
    assert stats.engine == "lockstep"
    lengths = [row.num_emitted for row in stats.row_stats]
    assert len(set(lengths)) > 1
    for row in stats.row_stats:  # of its text alone
        assert row.num_accepted == row.num_emitted - 1 - row.row_steps
    assert stats.num_accepted == sum(k * n for k, n in enumerate(stats.accepted_histogram))
    assert stats.row_steps == sum(stats.accepted_histogram)
    (source,) = stats.per_source.values()
    assert (source.drafted, source.accepted) == (stats.num_drafted, stats.num_accepted)
    assert source.exclusive == stats.num_accepted
    if drafters == "script":  # every draft is right as far as a text goes
        assert stats.num_steps == -(-(max(lengths) - 1) // 6)


def test_the_verdict_on_text_leaves_pads_out() -> None:
    # Row 0 goes on, row 1 ends with its second token, row 2 had ended before.
    verdict = Verdict(
        np.array([0, 3, 6, 9]), np.array([1, 2, 3, 4, 9, 0, 0, 0, 0]), np.array([0, 2, 4, 6]),
        np.array([0, 1, 5, 6, 0, 1], np.int32), np.array([True, True, False]),
        np.array([False, True, True]), np.array([3, 2, 0]),
    )  # fmt: skip
    text = verdict.of_text
    assert [text.emitted(row).tolist() for row in range(3)] == [[1, 2, 3], [4, 9], []]
    assert [text.accepted(row).tolist() for row in range(3)] == [[0, 1], [5], []]
    assert text.of_text is text
    assert verdict.num_accepted.tolist() == [2, 2, 2]

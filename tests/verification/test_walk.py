"""What a call in lockstep counts: live rows only, though finished ones are fed pads."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LogitsProcessorList

from lookahead_hf import SpeculativeConfig
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

"""Random calls return, stream, raise and leave behind the same as plain `generate`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import lookahead_hf
from tests.helpers.agreement import ABOUT, Tally, compare
from tests.helpers.random_calls import (
    DRAFTING,
    HYBRIDS,
    MODELS,
    PAIRS,
    REPEATABLE,
    SHARED,
    WAYS,
    RandomCall,
    calls,
    smallest,
)


def test_every_call_gets_what_plain_gives_it(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = request.config.getoption("--random-calls")
    caplog.set_level("ERROR", "transformers")  # which warns of many a setting
    tally = Tally()

    @settings(REPEATABLE, max_examples=num_calls)
    @given(call=calls())
    def agrees(call: RandomCall) -> None:
        compare(call, tally)

    lookahead_hf.warm_up(smallest("llama"))  # until then our drafters draft nothing
    agrees()
    assert tally.num_calls >= num_calls
    assert tally.num_accepted > tally.num_calls
    assert tally.num_moved > tally.num_calls / 5
    assert tally.num_raised < tally.num_calls / 10
    assert min(tally.engines["walk"], tally.engines["lockstep"]) > tally.num_calls / 10
    if num_calls < 500:
        return
    kinds = "scripted", *MODELS, *SHARED, *HYBRIDS, *PAIRS, *ABOUT, *WAYS
    assert [kind for kind in kinds if not tally.accepted[kind]] == []
    assert sum(tally.accepted[kind] for kind in DRAFTING[1:]) > 0

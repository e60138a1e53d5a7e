"""An engine from outside of the package, by the contract of `runner.host`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeStats
from lookahead_hf.call import optional
from lookahead_hf.call.execution import NO_ENGINE
from lookahead_hf.runner.host import Runner, StepOptions
from tests.helpers.models import prompt, tiny


class Counting(Runner):
    """Runs the model's own forward, and counts how often."""

    execution = "counted"
    num_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Counting.num_forwards += 1
        return super().forward(*args, **kwargs)


def runner(options: StepOptions) -> Runner | None:
    """The engine, which this module is; it leaves single rows to the model's own code."""
    if options.num_rows == 1:
        return None
    is_packed = options.takes_packed(False)
    return Counting(options.model, options.num_rows, options.shape, is_packed=is_packed)


def speculated(rows: int) -> SpeculativeStats:
    """Compare a call with plain, and return what it did."""
    model, ids = tiny("llama"), prompt(rows)
    call = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    ours = lookahead_hf.generate(model, ids, **call)
    assert torch.equal(ours, model.generate(ids, **call))
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    return stats


def test_a_new_engine_runs_the_steps_of_the_calls_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(optional.MODULES, "cpu", __name__)
    taken = speculated(rows=2)
    assert taken.execution == "counted" and taken.own_code == ()
    assert Counting.num_forwards >= taken.num_steps > 0
    left = speculated(rows=1)
    assert left.execution == "model" and left.own_code == ()
    monkeypatch.setitem(optional.MODULES, "cpu", "lookahead_hf.engines.missing")
    assert speculated(rows=2).own_code == (NO_ENGINE,)

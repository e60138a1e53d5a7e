"""Warming up leaves compiled code and measured costs, and no trace in the model."""

from __future__ import annotations

import pytest

import lookahead_hf
from lookahead_hf import ngram_pool
from lookahead_hf.drafting.session import cost_setting, memory_of
from tests.models import prompt, tiny


@pytest.mark.parametrize("batch_size", [1, 3])
def test_costs_are_known_afterwards(batch_size: int) -> None:
    model = tiny("llama")
    before = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    lookahead_hf.warm_up(model, batch_size=batch_size, context_length=20, max_draft_nodes=16)
    curve = memory_of(model).costs.curve(batch_size, 20, cost_setting(model))
    assert all(curve.num_samples(size) >= 3 for size in (0, 1, 2, 4, 8, 16))
    assert curve.num_samples(32) == 0
    assert ngram_pool.compiled()
    assert model.config._attn_implementation == "sdpa"
    assert model.generate(prompt(), max_new_tokens=8, do_sample=False).tolist() == before.tolist()


@pytest.mark.parametrize("name", ["batch_size", "context_length"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        lookahead_hf.warm_up(tiny("llama"), **{name: 0})

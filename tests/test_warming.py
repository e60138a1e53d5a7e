"""Warming up leaves compiled code and measured costs, and no trace in the model."""

from __future__ import annotations

import pytest

import lookahead_hf
from lookahead_hf import ngram_pool
from lookahead_hf.drafting.session import cost_setting, memory_of
from tests.models import prompt, tiny
from tests.test_encoder_decoder import tiny_pair


@pytest.mark.parametrize("batch_size", [1, 3])
def test_costs_are_known_afterwards(batch_size: int) -> None:
    model = tiny("llama")
    before = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    lookahead_hf.warm_up(model, batch_size=batch_size, context_length=20, max_draft_nodes=16)
    curve = memory_of(model).costs.curve(batch_size, 20, cost_setting(model), "recorded")
    assert all(curve.num_samples(size) >= 3 for size in (0, 1, 2, 4, 8, 16))
    assert curve.num_samples(32) == 0
    assert ngram_pool.compiled()
    assert model.config._attn_implementation == "sdpa"
    assert model.generate(prompt(), max_new_tokens=8, do_sample=False).tolist() == before.tolist()


@pytest.mark.parametrize("name", ["batch_size", "context_length", "max_draft_nodes"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_what_is_no_number_from_one_on_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an int from 1 on"):
        lookahead_hf.warm_up(tiny("llama"), **{name: value})  # type: ignore[arg-type]


def test_a_table_of_positions_is_not_outgrown() -> None:
    model = tiny("gpt2", n_positions=32)
    lookahead_hf.warm_up(model, context_length=256)
    curve = memory_of(model).costs.curve(1, 15, cost_setting(model), "recorded")
    assert curve.num_samples(16) >= 3
    assert curve.num_samples(24) == 0


def test_positions_that_change_with_the_length_stay_as_they_are() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    before = model.model.rotary_emb.inv_freq.clone()
    lookahead_hf.warm_up(model, context_length=256)
    assert model.model.rotary_emb.inv_freq.tolist() == before.tolist()


def test_an_encoder_decoder_model_is_left_to_its_calls() -> None:
    lookahead_hf.warm_up(tiny_pair("bart"))
    assert ngram_pool.compiled()

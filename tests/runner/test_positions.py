"""Positions that end or change with the length: the text is plain's on both sides of the limit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculationFallbackError, SpeculativeConfig
from tests.helpers.device import on_device
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomTrees, chain, continuations, right, scripted

LIMIT = 20
DYNAMIC = {
    "max_position_embeddings": LIMIT,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
LONG = {
    "original_max_position_embeddings": LIMIT,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 6,
        "long_factor": [3.0] * 6,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": LIMIT,
    },
}
BY_LAYER_TYPE = {
    "max_position_embeddings": LIMIT,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
}
MODELS = {"llama": DYNAMIC, "phi3": LONG, "gemma3": BY_LAYER_TYPE}


def both(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **call: Any) -> Any:
    """Plain's text and ours with drafts around it, in this order, and the stats of ours."""
    call = {"do_sample": False, "pad_token_id": 0, "attention_mask": mask, **call}
    plain = model.generate(ids, **call)
    config = scripted(continuations(plain, ids.shape[1]), RandomTrees(1))
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative=config)
    return plain, ours, lookahead_hf.last_stats(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_call_across_the_limit_runs_plainly(name: str) -> None:
    model = tiny(name, **MODELS[name])
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=f"within {LIMIT} tokens"):
        plain, ours, stats = both(model, prompt(), max_new_tokens=30)
    assert stats.fallback_reason == "model"
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_call_below_the_limit_is_speculated(name: str, rows: int) -> None:
    model = tiny(name, **MODELS[name])
    ids, mask = prompt(rows), torch.ones(rows, 12, dtype=torch.long)
    mask[1:, :3] = 0
    plain, ours, stats = both(model, ids, mask, max_new_tokens=LIMIT + 1 - 12)
    assert stats.fallback_reason is None and stats.num_accepted > 0
    assert ours.tolist() == plain.tolist()
    config = SpeculativeConfig(on_fallback="error")
    with lookahead_hf.enabled(model), pytest.raises(SpeculationFallbackError, match="positions"):
        model.generate(ids, max_new_tokens=LIMIT + 2 - 12, speculative=config)


def test_long_factors_are_served_where_every_prompt_needs_them() -> None:
    model = tiny("phi3", **LONG)
    ids, mask = prompt(3, 30), torch.ones(3, 30, dtype=torch.long)
    mask[1, :9] = 0
    plain, ours, stats = both(model, ids, mask, max_new_tokens=30)
    assert stats.fallback_reason is None and stats.num_accepted > 0
    assert ours.tolist() == plain.tolist()
    mask[2, :10] = 0  # this row begins with exactly as many tokens as short factors are for
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning):
        plain, ours, stats = both(model, ids, mask, max_new_tokens=30)
    assert stats.fallback_reason == "model"
    assert ours.tolist() == plain.tolist()


def test_fixed_frequencies_have_no_limit() -> None:
    yarn = {"rope_type": "yarn", "factor": 25.6, "rope_theta": 10000.0}
    model = tiny("llama", rope_parameters={**yarn, "original_max_position_embeddings": LIMIT})
    plain, ours, stats = both(model, prompt(), max_new_tokens=30)
    assert stats.fallback_reason is None and stats.num_accepted > 0
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_draft_reaches_beyond_a_table_of_positions(name: str, rows: int) -> None:
    size = {"n_positions": 32} if name == "gpt2" else {"max_position_embeddings": 32}
    model = tiny(name, **size)
    ids = prompt(rows)
    full = model.generate(ids, max_new_tokens=20, do_sample=False)
    last = full[:, -1].tolist()  # ends every row before the table does
    call = {"max_new_tokens": 100, "eos_token_id": last, "pad_token_id": 0, "do_sample": False}
    plain = model.generate(ids, **call)
    truths = [[*truth, *[5] * 40] for truth in continuations(plain, 12)]
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative=scripted(truths, right(40)))
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("where", [nullcontext, on_device])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_texts_that_fill_a_table_of_positions_wait_for_each_other(
    name: str, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"n_positions": 32} if name == "gpt2" else {"max_position_embeddings": 32}
    model = tiny(name, **size)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :4] = mask[2, :7] = 0
    for new in (19, 20, 21):
        with where(monkeypatch):
            plain, ours, stats = both(model, prompt(3), mask, max_new_tokens=new)
        assert stats.fallback_reason is None and stats.num_accepted > 0
        assert stats.engine == ("walk" if where is nullcontext else "device")
        assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("ended", [0, 1])
def test_a_text_that_ends_early_is_fed_pads_to_the_tables_end(ended: int) -> None:
    model, ids = tiny("gpt2", n_positions=32), prompt(2)
    call = {"max_new_tokens": 21, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids, **call).tolist()
    eos = next(token for token in text[ended][15:] if token not in text[1 - ended])
    call |= {"eos_token_id": eos, "attention_mask": torch.ones_like(ids)}
    call["return_dict_in_generate"] = True
    plain = model.generate(ids, **call)
    config = scripted(continuations(plain.sequences, 12), RandomTrees(1))
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative=config)
    assert ours.speculative_stats.num_accepted > 0
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.sequences.shape[1] == 33
    for a, b in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)


def test_a_text_that_outgrows_its_table_fails_as_it_does_plainly() -> None:
    model = tiny("gpt2", n_positions=32)
    config = scripted([[5] * 100], lambda rest: chain(rest[:30]))
    with pytest.raises(IndexError):
        model.generate(prompt(), max_new_tokens=30, do_sample=False)
    with lookahead_hf.enabled(model), pytest.raises(IndexError):
        model.generate(prompt(), max_new_tokens=30, do_sample=False, speculative=config)


def test_rotary_positions_have_no_table() -> None:
    model = tiny("llama", max_position_embeddings=16)
    plain, ours, stats = both(model, prompt(), max_new_tokens=30)
    assert stats.fallback_reason is None
    assert stats.num_accepted > 10
    assert ours.tolist() == plain.tolist()

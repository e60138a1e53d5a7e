"""Positions that end or change with the length: the text is plain's on both sides of the limit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

import lookahead_hf
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.calls import compare
from tests.helpers.compared import compared
from tests.helpers.device import on_device
from tests.helpers.models import left_padded, prompt, tiny
from tests.helpers.scripted import chain, scripted

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


GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
TABLES = {"gpt2": {"n_positions": 32}, "opt": {"max_position_embeddings": 32}}


def runs_plainly(model: Any, inputs: dict[str, Any], max_new_tokens: int) -> None:
    """Assert that a call crosses the limit, says so, and writes plain's text."""
    call = {**inputs, **GREEDY, "max_new_tokens": max_new_tokens}
    plain = model.generate(**call)
    with (
        lookahead_hf.enabled(model),
        pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=f"within {LIMIT} tokens"),
    ):
        ours = model.generate(**call, speculative=True)
    assert ours.tolist() == plain.tolist()
    assert lookahead_hf.last_stats(model).fallback_reason == "model"  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_calls_up_to_the_limit_are_speculated(name: str, rows: int) -> None:
    model = tiny(name, **MODELS[name])
    inputs = left_padded((0, 3, 3)[:rows])
    compare(model, inputs, **GREEDY, max_new_tokens=LIMIT + 1 - 12)
    runs_plainly(model, inputs, LIMIT + 2 - 12)


def test_long_factors_are_served_where_every_prompt_needs_them() -> None:
    model = tiny("phi3", **LONG)
    compare(model, left_padded((0, 9, 0), 30), **GREEDY, max_new_tokens=30)
    # The last row begins with exactly as many tokens as short factors are for.
    runs_plainly(model, left_padded((0, 9, 10), 30), 30)


@pytest.mark.parametrize(
    "own",
    [
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 25.6,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": LIMIT,
            }
        },
        {"max_position_embeddings": 16},
    ],
    ids=["yarn", "no table"],
)
def test_fixed_frequencies_have_no_limit(own: dict[str, Any]) -> None:
    stats = compare(tiny("llama", **own), left_padded((0,)), **GREEDY, max_new_tokens=30)
    assert stats.num_accepted > 10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TABLES)
def test_no_draft_reaches_beyond_a_table_of_positions(name: str, rows: int) -> None:
    model = tiny(name, **TABLES[name])
    ids = prompt(rows)
    full = model.generate(ids, max_new_tokens=18, do_sample=False)
    last = full[:, -1].tolist()  # ends every row before the table does
    call = {"input_ids": ids, **GREEDY, "max_new_tokens": 100, "eos_token_id": last}
    compared(model, lambda: dict(call), 12, lambda rest: chain([*rest, *[5] * 40][:40]))


@pytest.mark.parametrize("where", [nullcontext, on_device])
@pytest.mark.parametrize("name", TABLES)
def test_texts_that_fill_a_table_of_positions_wait_for_each_other(
    name: str, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name, **TABLES[name])
    for new in (19, 20, 21):
        with where(monkeypatch):
            stats = compare(model, left_padded((0, 4, 7)), **GREEDY, max_new_tokens=new)
        assert stats.engine == ("walk" if where is nullcontext else "device")


@pytest.mark.parametrize("ended", [0, 1])
def test_a_text_that_ends_early_is_fed_pads_to_the_tables_end(ended: int) -> None:
    model, inputs = tiny("gpt2", **TABLES["gpt2"]), left_padded((0, 0))
    call = {**inputs, **GREEDY, "max_new_tokens": 21}
    text = model.generate(**call).tolist()
    eos = next(token for token in text[ended][15:] if token not in text[1 - ended])
    call |= {"eos_token_id": eos, "return_dict_in_generate": True}
    plain, ours, _ = compared(model, lambda: dict(call), 12)
    assert ours.sequences.shape[1] == 33
    assert_same_cache(ours[CACHE], plain[CACHE])


def test_a_text_that_outgrows_its_table_fails_as_it_does_plainly() -> None:
    model = tiny("gpt2", **TABLES["gpt2"])
    config = scripted([[5] * 100], lambda rest: chain(rest[:30]))
    for speculative in (False, config):
        with lookahead_hf.enabled(model), pytest.raises(IndexError):
            model.generate(prompt(), **GREEDY, max_new_tokens=30, speculative=speculative)

"""A user's cache comes back as the same object, as plain leaves it, over several turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import lookahead_hf
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.calls import padded
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny

KWARGS = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20}


def new_cache(model: Any, with_config: bool) -> DynamicCache:
    return DynamicCache(config=model.config) if with_config else DynamicCache()


def both(
    model: Any, caches: tuple[Any, Any], ids: torch.Tensor, mask: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """One turn: plain on the first cache, speculated on the second; return the text."""
    left = iter(caches)

    def call() -> dict[str, Any]:
        given = {"input_ids": ids, "attention_mask": mask, CACHE: next(left)}
        return {**given, **KWARGS, **kwargs}

    text: torch.Tensor = compared(model, call, ids.shape[1]).ours
    return text


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_columns_that_nobody_attended_come_back_as_plain_leaves_them(name: str) -> None:
    model = tiny(name)
    ids, mask = padded("left", 3, 12).values()
    mask[2, 10] = 0  # in the window of a sliding layer still
    eos = {"eos_token_id": [7, 8, 9, 10]}
    caches = new_cache(model, True), new_cache(model, True)
    first = both(model, caches, ids, mask, max_new_tokens=6, **eos)
    assert_same_cache(caches[1], caches[0])
    again = torch.cat([first, prompt(3, 4, seed=3)], 1)  # and from here on all columns are attended
    call = {"attention_mask": torch.ones_like(again), **KWARGS}
    expected, got = (model.generate(again, **{CACHE: cache}, **call) for cache in caches)
    assert got.tolist() == expected.tolist()


def test_a_cache_that_records_its_past_is_left_to_plain() -> None:
    """The caller may crop it afterwards, beyond what a window keeps."""
    model, ids = tiny("gemma3"), prompt()
    cache = new_cache(model, True)
    cache.activate_past_recording()
    call = {**KWARGS, CACHE: cache, "speculative": {"on_fallback": "error"}}
    error = pytest.raises(lookahead_hf.SpeculationFallbackError, match="past is recorded")
    with lookahead_hf.enabled(model), error:
        model.generate(ids, **call)


def test_only_the_new_tokens_with_the_whole_mask() -> None:
    model = tiny("llama")
    ids, mask = prompt(), torch.ones(1, 12, dtype=torch.long)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    outs = [model.generate(ids, **{CACHE: cache}, **KWARGS) for cache in caches]
    held = caches[0].get_seq_length()
    new = torch.cat([outs[0], prompt(1, 6, seed=5)], 1)
    full = torch.cat([mask, mask.new_ones(len(mask), new.shape[1] - mask.shape[1])], 1)
    both(model, (caches[0], caches[1]), new[:, held:], full)
    assert_same_cache(caches[1], caches[0])

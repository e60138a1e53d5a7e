"""Calls that break off while the cache is rearranged: a cache of the caller's stays usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import lookahead_hf
from lookahead_hf.cache import hf_layers
from lookahead_hf.cache.slots import SlotGroup
from tests.helpers.caches import CACHE
from tests.helpers.models import prompt, tiny
from tests.helpers.scripted import RandomTrees, continuations, scripted

ERRORS = (RuntimeError, KeyboardInterrupt)


class Bomb(TorchDispatchMode):
    """Raises in the place of the n-th operation."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        super().__init__()
        self.error, self.left = error, at

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", ["mistral", "llama"])
def test_a_cache_that_is_taken_over_in_part_is_put_back(
    name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, release = tiny(name), prompt(2), hf_layers.release
    cache, left = DynamicCache(config=model.config), [at]

    def released(layer: Any, users: bool) -> None:
        release(layer, users)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    call = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, pad_token_id=0, **call)
    monkeypatch.setattr(hf_layers, "release", released)
    with lookahead_hf.enabled(model), pytest.raises(KeyboardInterrupt):
        model.generate(ids, **{CACHE: cache}, speculative=True, pad_token_id=0, **call)
    assert {layer.keys.shape[2] for layer in cache.layers} == {7 if name == "mistral" else 12}
    rest = {**call, "max_new_tokens": 7, "attention_mask": torch.ones(2, 13, dtype=torch.long)}
    ids = plain[:, :13]
    assert torch.equal(model.generate(ids, **{CACHE: cache}, pad_token_id=0, **rest), plain)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_cache_of_the_callers_is_handed_back_whole(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, drop = tiny(name), prompt(2), SlotGroup.drop_unseen
    call = {"do_sample": False, "pad_token_id": 0}
    mask = torch.ones(2, 52, dtype=torch.long)
    first = {**call, "attention_mask": mask[:, :12], "max_new_tokens": 40}
    plain = model.generate(ids, **first)
    for at in (2, 4):

        def breaks_off(self: SlotGroup, slots: int, at: int = at) -> None:
            with Bomb(error, at):
                drop(self, slots)

        cache = DynamicCache(config=model.config)
        config = scripted(continuations(plain, 12), RandomTrees(0))
        monkeypatch.setattr(SlotGroup, "drop_unseen", breaks_off)
        with lookahead_hf.enabled(model), pytest.raises(error):
            model.generate(ids, **{CACHE: cache}, speculative=config, **first)
        monkeypatch.setattr(SlotGroup, "drop_unseen", drop)
        seen = cache.get_seq_length() + 1
        assert seen > 13
        rest = {**call, "attention_mask": mask[:, :seen], "max_new_tokens": 52 - seen}
        whole = model.generate(plain[:, :seen], **{CACHE: cache}, **rest)
        assert whole.tolist() == plain.tolist()

"""The keys of an indexer come back with the user's cache, over two turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.helpers.architectures import build
from tests.helpers.caches import CACHE, assert_same_cache
from tests.helpers.compared import compared
from tests.helpers.models import prompt


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "dots3_note_text"])
@pytest.mark.filterwarnings("ignore")
def test_turns_with_sparse_attention(model_type: str, kind: Any) -> None:
    model = build(model_type)
    room = {"max_cache_len": 64} if kind is StaticCache else {}
    caches = [kind(config=model.config, **room) for _ in range(2)]
    ids = prompt(3, 10, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, 3] = 0
    for turn in range(2):
        left = iter(caches)

        def call() -> dict[str, Any]:
            given = {"input_ids": ids, "attention_mask": mask, CACHE: next(left)}  # noqa: B023
            return {**given, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}

        text = compared(model, call, ids.shape[1]).ours
        plain, ours = caches
        assert_same_cache(ours, plain)
        for a, b in zip(ours.layers, plain.layers, strict=True):
            if hasattr(a, "indexer_keys"):
                assert torch.allclose(a.indexer_keys, b.indexer_keys, atol=5e-4, rtol=1e-3)
        ids = torch.cat([text, prompt(3, 4, seed=turn)], 1)
        mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], 1)

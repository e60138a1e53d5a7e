"""The real model's text, fp32: prompts alone, and ragged batches of four."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lookahead_hf
from tests.helpers.compared import compared
from tests.helpers.real_texts import encode, load_real_model, texts

NEW_TOKENS = 24
CONFIG = lookahead_hf.SpeculativeConfig(budget=16)


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, Any]]:
    threads = torch.get_num_threads()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    yield load_real_model(torch.float32)
    torch.set_num_threads(threads)


def assert_equal(model: Any, inputs: Any, **kwargs: Any) -> lookahead_hf.SpeculativeStats:
    call = {**inputs, "max_new_tokens": NEW_TOKENS, **kwargs}
    return compared(model, lambda: call, inputs["input_ids"].shape[1], config=CONFIG).stats


@pytest.mark.parametrize(
    ("per_family", "longest"), [(1, 500), pytest.param(3, 1500, marks=pytest.mark.slow)]
)
def test_greedy_one_by_one(loaded: tuple[Any, Any], per_family: int, longest: int) -> None:
    model, tokenizer = loaded
    prompts = texts(per_family, longest)
    assert len(prompts) >= 6 * per_family
    accepted = 0
    for prompt in prompts:
        accepted += assert_equal(model, encode(tokenizer, [prompt]), do_sample=False).num_accepted
    assert accepted > 0.2 * NEW_TOKENS * len(prompts)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_ragged_batch_of_four(loaded: tuple[Any, Any], do_sample: bool) -> None:
    model, tokenizer = loaded
    prompts = texts(per_family=1, longest=500)[2 * do_sample :][:4]
    kwargs = {"temperature": 0.7, "top_p": 0.9} if do_sample else {}
    stats = assert_equal(model, encode(tokenizer, prompts), do_sample=do_sample, **kwargs)
    assert len({row.num_accepted for row in stats.row_stats}) > 1

"""Texts that draw from the default generators in turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import lookahead_hf
from lookahead_hf.verification.noise import OwnGenerators, fresh_seed
from tests.helpers.models import prompt
from tests.helpers.requests import DRAFTED, WAIT, alone, prompts, running, settings, speculated

CPU = torch.device("cpu")


def test_a_text_within_a_text_has_numbers_of_its_own() -> None:
    outer, inner = OwnGenerators(CPU, 7), OwnGenerators(CPU, 8)
    with outer.in_place(), ThreadPoolExecutor(1) as other:
        first = torch.rand(3)
        assert other.submit(fresh_seed).result() >= 0
        with inner.in_place():
            within = torch.rand(3)
        second = torch.rand(3)
    with torch.random.fork_rng([]):
        torch.manual_seed(8)
        assert torch.equal(within, torch.rand(3))
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3)) and torch.equal(second, torch.rand(3))


def test_a_call_within_a_text_samples_as_plain_does(model: Any) -> None:
    call = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    ids = prompt(1, 9)
    with OwnGenerators(CPU, 7).in_place():
        ours = [model.generate(ids, **call, speculative=DRAFTED) for _ in range(2)]
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        for each in ours:
            assert torch.equal(each, model.generate(ids, **call, speculative=False))


class AsksJudge(LogitsProcessor):
    """Lets another manager write a text, and waits for it."""

    def __init__(self, judge: Any) -> None:
        self.judge = judge

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.judge.add_request([5, 6, 7], max_new_tokens=4)
        answer = self.judge.get_result(timeout=WAIT)
        assert answer is not None and answer.is_finished()
        return scores.index_fill(1, torch.tensor(answer.generated_tokens), 4.0)

    def __deepcopy__(self, memo: Any) -> AsksJudge:
        return self


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_processor_waits_for_another_manager(model: Any, do_sample: bool) -> None:
    config, (text,) = settings(model, max_new_tokens=12, do_sample=do_sample), prompts(1)
    with running(model, settings(model)) as judge:
        given = {"logits_processor": [AsksJudge(judge)]}
        with running(model, config) as manager:
            manager.add_request(text, **given)
            found = manager.get_result(timeout=WAIT)
        expected = alone(model, text, config, **given)
    assert found.generated_tokens == expected
    speculated([found])

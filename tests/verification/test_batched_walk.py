"""All rows asked together: plain's text, and processors cost no more than plain's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

import lookahead_hf
from lookahead_hf.verification import select, walk
from tests.helpers.compared import compared
from tests.helpers.models import left_padded
from tests.helpers.random_calls import smallest
from tests.helpers.requests import DRAFTED, alone, prompts, settings, speculated
from tests.helpers.scripted import RandomTrees, right


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU are verified as batches on an accelerator are."""
    monkeypatch.setattr(select, "pays_batched", lambda device, num_rows: num_rows > 1)


def call(rows: int, **settings: Any) -> dict[str, Any]:
    pads = (*[0] * (rows - 1), 3)
    return {**left_padded(pads), "max_new_tokens": 20, "pad_token_id": 0, **settings}


TOP_H = {"do_sample": True, "top_k": 0, "top_h": 0.6}


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the warper of `TOP_H` was given."""
    seen: list[int] = []
    stock = hf.TopHLogitsWarper.__call__

    def counting(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(len(scores))
        return stock(self, input_ids, scores)

    monkeypatch.setattr(hf.TopHLogitsWarper, "__call__", counting)
    return seen


def test_it_is_one_call_for_all_rows(together: None, rows_seen: list[int]) -> None:
    """As often as plain calls it, with as many rows, where all rows get as far."""
    compared(smallest("llama"), lambda: call(4, **TOP_H), 12, right(4))
    assert rows_seen == [4] * 40  # twenty by plain, twenty by ours


@pytest.mark.parametrize("rows", [1, 3])
def test_on_a_cpu_a_token_costs_its_own_row(rows: int, rows_seen: list[int]) -> None:
    compared(smallest("llama"), lambda: call(rows, **TOP_H), 12, RandomTrees(1))
    assert rows_seen == [rows] * 20 + [1] * 20 * rows


def test_greedy_rows_of_a_queue_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests only the first tokens, which come one by one, are read one by one."""
    model, seen = lookahead_hf.enable(smallest("llama")), list[int]()

    def counted(logits: torch.Tensor) -> int:
        seen.append(1)
        return int(logits.argmax())

    monkeypatch.setattr(walk, "reads_wait", lambda _: True)
    monkeypatch.setattr(walk, "argmax", counted)
    config, texts = settings(model), prompts(3)
    found = model.generate_batch(texts, config, speculative=DRAFTED, max_slots=3).values()
    assert [each.generated_tokens for each in found] == [alone(model, t, config) for t in texts]
    speculated(found)
    assert sum(seen) == 3

"""How often processors and the logits of a step are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

import lookahead_hf
from lookahead_hf.verification import walk
from tests.helpers.compared import compared
from tests.helpers.models import left_padded
from tests.helpers.random_calls import smallest
from tests.helpers.requests import DRAFTED, alone, prompts, settings, speculated
from tests.helpers.scripted import RandomTrees


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_costs_its_own_row(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []  # rows of each call of a warper
    stock = hf.TopHLogitsWarper.__call__

    def counting(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(len(scores))
        return stock(self, input_ids, scores)

    monkeypatch.setattr(hf.TopHLogitsWarper, "__call__", counting)
    call = {**left_padded((*[0] * (rows - 1), 3)), "max_new_tokens": 20, "pad_token_id": 0}
    call |= {"do_sample": True, "top_k": 0, "top_h": 0.6}
    compared(smallest("llama"), lambda: dict(call), 12, RandomTrees(1))
    assert seen == [rows] * 20 + [1] * 20 * rows


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

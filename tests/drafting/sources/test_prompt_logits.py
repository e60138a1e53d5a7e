"""What recycling is shown of a prompt is what the target expects there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import lookahead_hf
from lookahead_hf.drafting.sources.prompt_logits import LEAST_NEW_TOKENS, seed
from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
from lookahead_hf.rows import Rows
from lookahead_hf.runner.prompt_states import PromptStates
from tests.helpers.models import prompt, tiny


class Listens(RecyclingDrafter):
    """Keeps what it was shown."""

    shown: list[tuple[int, int, np.ndarray]]

    def seed(self, rows, row, start, top_ids, top_probs):  # type: ignore[no-untyped-def]
        self.shown.append((row, start, top_ids))


@pytest.mark.parametrize("length", [5, 150])
@torch.no_grad()
def test_every_attended_token_of_every_row(length: int) -> None:
    model, ids = tiny("llama"), prompt(2, length)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    states = PromptStates(model)
    with states.captured():
        inputs = {"attention_mask": mask, "position_ids": position_ids, "logits_to_keep": 1}
        model(ids, **inputs, past_key_values=DynamicCache(config=model.config))
    expected = model(ids, attention_mask=mask, position_ids=position_ids).logits
    rows = Rows(ids.numpy(), mask.numpy().astype(bool))
    for row in range(2):
        rows.emit(row, 5)
    drafter = Listens(top_k=4)
    drafter.shown = []
    drafter.begin(rows)
    seed(drafter, rows, states, LEAST_NEW_TOKENS - 1)
    assert not drafter.shown
    seed(drafter, rows, states, LEAST_NEW_TOKENS)
    assert [(row, start) for row, start, _ in drafter.shown] == [(0, 0), (1, 0)]
    for row, _, top_ids in drafter.shown:
        best = expected[row, mask[row] == 1].topk(4).indices
        assert top_ids.tolist() == best.tolist()


def test_a_long_answer_recycles_its_prompt_and_stays_plains() -> None:
    model, ids = tiny("llama"), prompt(1, 40)
    call = {"max_new_tokens": LEAST_NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **call)
    config = lookahead_hf.SpeculativeConfig(drafters=("recycling",), budget=16)
    with lookahead_hf.enabled(model):
        ours = model.generate(ids, **call, speculative=config)
    assert ours.tolist() == plain.tolist()
    stats = lookahead_hf.last_stats(model)
    assert stats is not None and stats.fallback_reason is None and stats.num_accepted > 0
    assert not model.model._forward_hooks

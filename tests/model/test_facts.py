"""What is known of a model: read in one walk when a call begins, and never older than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.model.facts import facts_of
from tests.helpers.models import prompt, tiny

CALL: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def hook_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def move_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.to("meta")


@pytest.mark.parametrize("change", [hook_a_layer, move_a_layer])
def test_a_change_inside_the_model_counts_from_the_next_call_on(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookahead_hf.enable(tiny("llama"))
    seen: list[tuple[Any, ...]] = []

    def noted(*_: Any) -> None:
        facts = facts_of(model)
        seen.append((facts.is_hooked, facts.devices))
        raise lookahead_hf.fallback.Unserved(lookahead_hf.FallbackReason.CACHE, "for the test")

    monkeypatch.setattr("lookahead_hf.call.admission._check_kind", noted)
    for _ in range(2):
        with pytest.raises(lookahead_hf.SpeculationFallbackError):
            model.generate(prompt(), **CALL, speculative={"on_fallback": "error"})
        change(model)
    before, after = seen
    assert before == (False, {torch.device("cpu")}) and after != before


def test_no_part_of_a_model_is_kept_alive() -> None:
    model = tiny("llama")
    facts = facts_of(model)
    held = {id(each) for each in vars(facts).values()}
    assert not held & {id(module) for module in model.modules()}
    assert facts.mixers == [] and not facts.needs_columns

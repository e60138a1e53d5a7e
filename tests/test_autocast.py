"""Calls under `torch.autocast`: plain's text, and no verdict that outlives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.model import self_test
from lookahead_hf.model.state import state_of
from tests.helpers.architectures import build
from tests.helpers.models import tiny
from tests.helpers.requests import DRAFTED, prompts, settings, speculated

pytestmark = pytest.mark.filterwarnings("ignore")


def test_requests_are_decoded_together_under_autocast() -> None:
    model = lookahead_hf.enable(tiny("llama"), default=DRAFTED)
    texts = prompts(3)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate_batch(texts, settings(model))
    assert not any(output.error for output in found.values())
    assert all(len(output.generated_tokens) == 24 for output in found.values())
    speculated(found.values())


@pytest.mark.parametrize("model_type", ["glm4", "lfm2"])
def test_a_verdict_holds_for_the_numerics_that_it_was_made_in(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "passed", {})
    model = build(model_type)
    tried: list[Any] = []
    own = self_test.fault

    def refusing(model: Any, is_packed: bool) -> str:
        tried.append(torch.is_autocast_enabled("cpu"))
        return "other numbers" if tried[-1] else own(model, is_packed)

    monkeypatch.setattr(self_test, "fault", refusing)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert self_test.refusal(model) == ("other numbers", "")
        assert self_test.refusal(model) == ("", "")
    assert tried == [True, False]
    assert self_test.refusal(model.bfloat16()) == ("", "")
    assert tried == [True, False, False]
    assert len(state_of(model).self_tests) == 3

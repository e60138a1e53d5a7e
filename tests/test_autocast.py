"""Calls under `torch.autocast`: plain's text, and no verdict that outlives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead_hf
from lookahead_hf.model import self_test
from lookahead_hf.model.state import state_of
from lookahead_hf.tools.cli.near_ties import find_divergences
from tests.helpers import compared
from tests.helpers.architectures import build
from tests.helpers.models import left_padded, prompt, tiny
from tests.helpers.requests import DRAFTED, prompts, settings, speculated
from tests.helpers.scripted import RandomChains, continuations, scripted

pytestmark = pytest.mark.filterwarnings("ignore")

CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("llama", torch.bfloat16), ("lfm2", torch.float16)]
)
def test_a_text_parts_from_plains_at_near_ties_alone(model_type: str, dtype: Any) -> None:
    model = tiny(model_type) if model_type != "lfm2" else build(model_type)
    lookahead_hf.enable(model)
    call = {**CALL, **left_padded((0, 4, 9), 17, seed=3)}
    with torch.autocast("cpu", dtype):
        plain = model.generate(**call, speculative=False)
        drafts = scripted(continuations(plain, 17), RandomChains())
        ours = model.generate(**call, speculative=drafts)
        compared.speculated(model)
        texts = [each[:, 17:].tolist() for each in (plain, ours)]
        divergences = find_divergences(model, call, texts[0], texts[1:], dtype=dtype)[0]
    assert [each for each in divergences if each and not each.is_near_tie] == []


@pytest.mark.parametrize("compiled", [False, True])
def test_the_models_own_layers_run_under_autocast(compiled: Any) -> None:
    model, ids = lookahead_hf.enable(tiny("llama")), prompt(2, 17)
    config = {"budget": 8, "compiled_layers": compiled}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(ids, **CALL, speculative=config)
    assert compared.speculated(model).execution == "model"


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
    model = build(model_type)
    tried: list[Any] = []
    own = self_test.fault

    def refusing(model: Any, is_flat: bool) -> str:
        tried.append(torch.is_autocast_enabled("cpu"))
        return "other numbers" if tried[-1] else own(model, is_flat)

    monkeypatch.setattr(self_test, "fault", refusing)
    monkeypatch.setattr(self_test, "passed", {})
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert self_test.refusal(model) == ("other numbers", "")
        assert self_test.refusal(model) == ("", "")
    assert tried == [True, False]
    assert self_test.refusal(model.bfloat16()) == ("", "")
    assert tried == [True, False, False]
    assert len(state_of(model).trials) == 3

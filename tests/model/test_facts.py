"""What is known of a model: read in one walk when a call begins, and never older than that."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import lookahead_hf
from lookahead_hf.model.facts import facts_of
from tests.helpers.architectures import build
from tests.helpers.calls import padded
from tests.helpers.compared import speculated
from tests.helpers.models import prompt, tiny

CALL: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
MOST_WALKS = 3


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Walks over the modules of a model or its decoder that the package begins, by the file."""
    counts, original = Counter[str](), nn.Module.named_modules

    def named_modules(self: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == nn.modules.module.__file__ and frame.f_back is not None:
            frame = frame.f_back
        _, _, file = frame.f_code.co_filename.rpartition("/lookahead_hf/")
        is_whole = memo is None and isinstance(self, PreTrainedModel)
        if is_whole and frame.f_code.co_filename != file:
            counts[file] += 1
        return original(self, memo, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    return counts


PAIRS = ("bart", "t5")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "gpt_neo", "lfm2", *PAIRS])
def test_a_warm_call_walks_over_the_modules_at_most_three_times(
    name: str, walks: Counter[str]
) -> None:
    if name in PAIRS:
        model, inputs = tiny(name), padded("right", 3)
    else:
        is_tiny = name in ("llama", "gemma3", "gpt2")
        model, inputs = tiny(name) if is_tiny else build(name), {"input_ids": prompt(3)}
    lookahead_hf.enable(model)
    plain = model.generate(**inputs, **CALL)
    for _ in range(2):
        walks.clear()
        ids = model.generate(**inputs, **CALL, speculative={"budget": 4})
    speculated(model)
    assert torch.equal(ids, plain)
    assert 0 < walks.total() <= MOST_WALKS, walks


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

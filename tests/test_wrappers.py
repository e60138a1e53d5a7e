"""Models inside compiled, parallel, quantised and adapted ones, and what is no model."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationMixin, LlamaForCausalLM

import lookahead_hf
from lookahead_hf.utils import unwrap
from tests.helpers.calls import run
from tests.helpers.compared import served
from tests.helpers.fakes import PlainDecoding
from tests.helpers.models import prompt

STOCK = GenerationMixin.generate


class Wrapper:
    """A quantiser's wrapper: no module, `generate` passes on."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)


class Adapted(nn.Module):
    """PEFT's shape: the model below a tuner that passes attributes on."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> Any:
        return self.base_model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


@pytest.mark.parametrize(
    "wrap",
    [
        functools.partial(torch.compile, backend="eager"),
        nn.DataParallel,
        Wrapper,
        Adapted,
        lambda model: SimpleNamespace(model=Wrapper(model).model),
        lambda model: torch.compile(Adapted(model), backend="eager"),
    ],
    ids=["compile", "DataParallel", "quantiser", "peft", "pipeline", "compile(peft)"],
)
def test_wrappers_are_looked_into(model: Any, decoding: PlainDecoding, wrap: Any) -> None:
    wrapped = wrap(model)
    assert unwrap(wrapped) is model
    lookahead_hf.enable(wrapped)
    expected = run(model)
    reached = wrapped if hasattr(wrapped, "generate") else model
    assert torch.equal(run(reached, speculative=True), expected)
    assert decoding.calls[0].model is model
    assert served(wrapped).engine == "plain"
    lookahead_hf.disable(wrapped)
    assert "generate" not in vars(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's, about transformers
def test_peft_at_either_level(model: Any, decoding: PlainDecoding) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM")).eval()
    expected = adapted.generate(input_ids=prompt(), max_new_tokens=6)
    for level in (adapted, adapted.base_model, model):
        lookahead_hf.enable(level)
        got = adapted.generate(input_ids=prompt(), max_new_tokens=6, speculative=True)
        assert torch.equal(got, expected)
        lookahead_hf.disable(level)
    got = lookahead_hf.generate(adapted, input_ids=prompt(), max_new_tokens=6)
    assert torch.equal(got, expected)
    assert len(decoding.calls) == 4


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (None, "not None: it is no transformers model"),
        (nn.Linear(2, 2), "not Linear"),
        ("gpt2", r"loaded, as by AutoModelForCausalLM\.from_pretrained, not 'gpt2'"),
        (LlamaForCausalLM, "not <class 'transformers"),
    ],
)
def test_what_is_no_model_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookahead_hf.enable(thing)

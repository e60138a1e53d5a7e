"""The source of forwards decides about masks; a model whose source is missing is not served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaModel

from lookahead_hf import compat
from tests.helpers.compared import left_to_plain
from tests.helpers.models import prompt, tiny

MASKING = """
class Masking(Base):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return Base.forward(self, input_ids, attention_mask, **kwargs)
"""
IDENTITY = """
class Identity(Base):
    def forward(self, states):
        return states
"""


def without_source(code: str, base: type) -> Any:
    """A class that was made by `exec`, so that no file holds its source."""
    names: dict[str, Any] = {"Base": base}
    exec(code, names)
    return names[code.split()[1].split("(")[0]]


def test_the_masks_of_a_decoder_are_found() -> None:
    assert compat.mask_kinds(tiny("llama")) == ("full_attention",)
    assert compat.mask_kinds(tiny("mistral")) == ("sliding_attention",)
    gemma = tiny("gemma3")
    assert compat.mask_kinds(gemma) == ("full_attention", "sliding_attention")
    assert compat.layer_masks(gemma) == ("sliding_attention", "full_attention") * 2


def test_a_forward_without_source_that_takes_a_mask_is_not_served() -> None:
    model = tiny("llama")
    model.model.__class__ = without_source(MASKING, LlamaModel)
    call = {"inputs": prompt(2), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert compat.unreadable_forward(map(type, model.modules())) == "Masking"
    said = r"the source of Masking.forward, which handles masks, cannot be read.*\[model\]"
    left_to_plain(model, lambda: dict(call), said)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # from torch 2.14 on
def test_other_forwards_without_source_are_no_obstacle() -> None:
    model = tiny("llama")
    model.model.layers[0].extra = without_source(IDENTITY, nn.Module)()
    model.model.layers[1].extra = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert compat.unreadable_forward(map(type, model.modules())) is None
    assert compat.mask_kinds(model) == ("full_attention",)

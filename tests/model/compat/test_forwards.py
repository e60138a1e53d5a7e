"""The configuration decides about masks; no model's source is read."""

from __future__ import annotations

from typing import Any

from transformers import LlamaModel

from lookahead_hf.model import compat
from tests.helpers.calls import GREEDY
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny

MASKING = """
class Masking(Base):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return Base.forward(self, input_ids, attention_mask, **kwargs)
"""


def test_the_masks_of_a_decoder_are_found() -> None:
    assert compat.mask_kinds(tiny("llama")) == ("full_attention",)
    assert compat.mask_kinds(tiny("mistral")) == ("sliding_attention",)
    gemma = tiny("gemma3")
    assert compat.mask_kinds(gemma) == ("full_attention", "sliding_attention")
    assert compat.layer_masks(gemma) == ("sliding_attention", "full_attention")
    alike = tiny("gemma3", num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    assert compat.takes_mask_dict(alike) and compat.mask_kinds(alike) == ("sliding_attention",)


def test_a_forward_without_source_is_served() -> None:
    """As one that was made by `exec`, so that no file holds its source."""
    names: dict[str, Any] = {"Base": LlamaModel}
    exec(MASKING, names)
    model = tiny("llama")
    model.model.__class__ = names["Masking"]
    compared(model, lambda: {"input_ids": prompt(2), **GREEDY}, prompt(2).shape[1])

"""Models that attend by flash attention, which takes no mask of a draft tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AttentionInterface

from tests.helpers import replayed
from tests.helpers.calls import GREEDY, compare, padded
from tests.helpers.compared import left_to_plain
from tests.helpers.device import TapeRecorder
from tests.helpers.flash import with_flash
from tests.helpers.models import prompt, tiny

NAMES = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2")
SHORT = {**GREEDY, "max_new_tokens": 24}


@pytest.mark.parametrize(
    ("name", "model_type", "kind"),
    [(NAMES[0], "llama", "left"), (NAMES[1], "gemma3", "none"), (NAMES[2], "mistral", "holes")],
)
def test_prompts_are_read_by_flash_attention_and_steps_by_ours(
    name: str, model_type: str, kind: str, made: list[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    own = types if model_type == "gemma3" else {}
    model = tiny(model_type, num_hidden_layers=2, **own)
    flash = with_flash(model, name, monkeypatch)
    stats = replayed.compare(model, padded(kind), max_new_tokens=24)
    assert stats.execution == "replayed" and stats.num_moved > 0
    of_plain, of_ours = 2 * 24, 2 * 1
    assert len(flash.widths) == of_plain + of_ours
    assert flash.widths[-1] == flash.widths[0] > 1
    assert model.config._attn_implementation == name
    assert type(model.config._attn_implementation) is str  # not ours


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_are_in_the_steps(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name, attn="eager")
    with_flash(model, NAMES[1], monkeypatch)
    assert compare(model, padded("left", rows), **SHORT).num_moved > 0


def own_function(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A caller's function in the place of transformers'."""
    model = tiny("llama", num_hidden_layers=1)
    with_flash(model, NAMES[0], monkeypatch)
    theirs = AttentionInterface._global_mapping[NAMES[0]]
    monkeypatch.setitem(
        AttentionInterface._global_mapping, NAMES[0], lambda *args, **kw: theirs(*args, **kw)
    )
    return model


def with_encoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its cross-attention would get the mask of the encoder's columns beside a block of tokens."""
    model = tiny("bart")
    with_flash(model, NAMES[0], monkeypatch)
    return model


def of_the_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Falcon's own class for flash attention, which looks nothing up."""
    model = tiny("llama", num_hidden_layers=1)
    with_flash(model, NAMES[0], monkeypatch)
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    return model


@pytest.mark.parametrize("make", [own_function, with_encoder, of_the_file])
def test_what_cannot_be_replaced_is_plains(
    make: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(monkeypatch)
    call = {"input_ids": prompt(), **SHORT}
    found = left_to_plain(model, lambda: dict(call), "flash_attention_2")
    assert 'attn_implementation="sdpa"' in str(found[0].message)

"""Classifier-free guidance: its second, unconditional run sees every token once and in order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.calls import padded
from tests.helpers.compared import compared
from tests.helpers.models import prompt, tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "eos": {"do_sample": True, "top_k": 0, "eos_token_id": [3, 4, 5]},
}


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_plains(rows: int, settings: dict[str, Any], negative: bool) -> None:
    inputs = {"input_ids": prompt()} if rows == 1 else padded("left")
    guided = {**inputs, **settings, "guidance_scale": 1.5, "max_new_tokens": 30, "pad_token_id": 0}
    if negative:
        guided["negative_prompt_ids"] = prompt(rows, 6, seed=5)
    stats = compared(tiny("llama"), lambda: dict(guided), inputs["input_ids"].shape[1]).stats
    assert stats.engine == "lockstep"

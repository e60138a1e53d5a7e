"""Mixers get whole blocks where that is known to be right, and else the tokens one by one."""

from __future__ import annotations

from typing import Any

import pytest

from lookahead_hf.model import compat, self_test
from lookahead_hf.model.facts import facts_of
from tests.helpers.architectures import build
from tests.helpers.recurrent import RECURRENT, harsh_gap

pytestmark = pytest.mark.filterwarnings("ignore")

STEPWISE = ("falcon_mamba", "jamba", "mamba", "nemotron_h", "zamba", "zamba2")
"""Types whose forward of several tokens ignores the state, or limits time steps."""


def whole(model: Any) -> set[bool]:
    """Whether the model's mixers get whole blocks."""
    return {compat.takes_blocks(mixer) for mixer in facts_of(model).mixers}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_sound_mixers_get_whole_blocks(model_type: str) -> None:
    model = build(model_type)
    assert self_test.refusal(model) == ("", "")
    assert whole(model) == {model_type not in STEPWISE}


def test_unknown_mixers_get_tokens_one_by_one() -> None:
    model = build("lfm2")
    (mixer,) = facts_of(model).mixers
    mixer.__class__ = type("Copied", (type(mixer),), {"__module__": "modeling_copied"})
    assert whole(model) == {False}
    assert self_test.refusal(model) == ("", "")


def test_a_limit_of_time_steps_makes_mixers_get_tokens_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_test, "passed", {})
    changed = {"time_step_limit": (0.3, 2.0)}
    assert harsh_gap("bamba", 20, **changed) < 1e-4
    monkeypatch.setattr(compat, "takes_blocks", lambda _: True)
    with pytest.raises(AssertionError):  # another text
        harsh_gap("bamba", 20, **changed)

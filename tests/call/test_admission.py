"""One list of checks, of which each purpose has its part."""

from __future__ import annotations

from typing import Any

import pytest

from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.fallback import FallbackReason, Unserved
from tests.helpers.architectures import build
from tests.helpers.models import tiny


def refusal(model: object, purpose: Purpose) -> FallbackReason | None:
    try:
        admission.admit(model, purpose)
    except Unserved as unserved:
        return unserved.reason
    return None


@pytest.mark.parametrize("purpose", Purpose)
def test_an_ordinary_model_is_admitted_for_all_purposes(purpose: Purpose) -> None:
    assert refusal(tiny("llama"), purpose) is None


def test_each_purpose_has_checks_of_its_own() -> None:
    found = {purpose: refusal(build("lfm2"), purpose) for purpose in Purpose}
    stateful = FallbackReason.STATEFUL
    assert found == dict.fromkeys(Purpose) | {
        Purpose.ASSISTANT: stateful,
        Purpose.REQUESTS: stateful,
    }
    found = {purpose: refusal(tiny("t5"), purpose) for purpose in Purpose}
    assert found == dict.fromkeys(Purpose) | {Purpose.REQUESTS: FallbackReason.CONTINUOUS_BATCHING}


class Prepares:
    """Something that prepares the inputs of each forward in the model's place."""

    def __init__(self, model: Any) -> None:
        self._prepare = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepare(*args, **kwargs)


def test_inputs_that_another_object_prepares_are_refused() -> None:
    model = tiny("llama")
    model.prepare_inputs_for_generation = Prepares(model).prepare_inputs_for_generation
    with pytest.raises(Unserved, match=r"Prepares prepares its inputs.*\[adapter\]"):
        admission.admit(model, Purpose.CALL)

"""PEFT's prompt and prefix tuning prepare the inputs of each forward: plain generate runs."""

from __future__ import annotations

import pytest

import lookahead_hf
from tests.helpers.calls import GREEDY, padded
from tests.helpers.compared import reason_of
from tests.helpers.encoder_decoder import call
from tests.helpers.models import tiny

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),
    pytest.mark.filterwarnings("ignore:`is_|Passing:UserWarning"),
]
CONFIGS = {
    "prefix_tuning": peft.PrefixTuningConfig,
    "prompt_tuning": peft.PromptTuningConfig,
    "p_tuning": peft.PromptEncoderConfig,
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("name", "task"), [("llama", "CAUSAL_LM"), ("t5", "SEQ_2_SEQ_LM")])
def test_virtual_tokens_are_left_to_plain(name: str, task: str, kind: str) -> None:
    given = {"encoder_hidden_size": 16} if kind == "p_tuning" else {}
    wrapped = peft.get_peft_model(
        tiny(name), CONFIGS[kind](task_type=task, num_virtual_tokens=5, **given)
    ).eval()
    arguments = call(3, **GREEDY) if name == "t5" else {**padded("left"), **GREEDY}
    expected = wrapped.generate(**arguments)
    lookahead_hf.enable(wrapped)
    said = rf"{kind.upper()} prepares its inputs.*\[adapter\]"
    with pytest.warns(lookahead_hf.SpeculationFallbackWarning, match=said):
        got = wrapped.generate(**arguments, speculative=True)
    assert got.tolist() == expected.tolist()
    assert reason_of(wrapped) == "adapter"

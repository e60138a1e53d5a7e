"""The device engine, forced on CPU tensors: plain's text, one copy to the host per step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import StoppingCriteriaList, StopStringCriteria

import lookahead_hf
from tests.helpers.caches import CACHE
from tests.helpers.calls import GREEDY, compare, padded
from tests.helpers.compared import compared
from tests.helpers.device import on_device
from tests.helpers.models import NAMES, prompt, tiny
from tests.helpers.scripted import continuations, right, scripted
from tests.helpers.tiny_chat import byte_tokenizer

QUICK = ("llama", "mistral", "gpt2")


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with on_device(monkeypatch):
        yield


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_greedy(name: str) -> None:
    stats = compare(tiny(name), padded("holes"), **GREEDY)
    assert stats.engine == "device"
    assert stats.num_moved > 0
    assert stats.execution == "the device has no graphs"


def test_stop_strings_end_texts_and_time_is_read() -> None:
    model, inputs, tokenizer = tiny("llama"), padded("left", rows=4), byte_tokenizer()
    plain = model.generate(**inputs, **GREEDY)
    start = inputs["input_ids"].shape[1] + 11
    ends = [tokenizer.decode(row[start : start + 2]) for row in plain[:2]]
    stops = StoppingCriteriaList([StopStringCriteria(tokenizer, ends)])
    call = {**GREEDY, "stopping_criteria": stops, "max_time": 1000.0, "eos_token_id": [1]}
    stats = compare(model, inputs, **call)
    assert stats.engine == "device"
    assert len({row.num_emitted for row in stats.row_stats}) > 1


def test_finished_rows_are_fed_pads_where_the_cache_is_returned() -> None:
    model, inputs = tiny("llama"), padded("left", rows=4)
    call = {**inputs, "max_new_tokens": 60, "pad_token_id": 0, "eos_token_id": list(range(3, 12))}
    call |= {"do_sample": False, "return_dict_in_generate": True}
    columns = inputs["input_ids"].shape[1]
    plain, ours, stats = compared(model, lambda: dict(call), columns, right(4))
    assert stats.engine == "device"
    assert ours[CACHE].get_seq_length() == plain[CACHE].get_seq_length()


def test_probabilities_that_are_not_finite_raise_as_in_plain() -> None:
    model = tiny("llama")
    plain = model.generate(prompt(), **GREEDY)
    config = scripted(continuations(plain, 12), right(4))
    with torch.no_grad():
        model.lm_head.weight[50:] = torch.inf
    for speculative in (False, config):
        with lookahead_hf.enabled(model), pytest.raises(RuntimeError, match="inf"):
            model.generate(prompt(), max_new_tokens=9, do_sample=True, speculative=speculative)

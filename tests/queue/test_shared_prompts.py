"""Prompts that several texts share are read once, whenever these texts begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lookahead_hf
from lookahead_hf.queue import scheduler
from lookahead_hf.queue.scheduler import Prompts
from tests.helpers import models, requests
from tests.helpers.requests import DRAFTED, WAIT, alone, prompts, seeded, settings, speculated

LONG = (prompts(1, 3)[0] * 30)[:40]  # A prompt of several pieces


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return lookahead_hf.enable(models.tiny(request.param), default=DRAFTED)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt that is read, alone or in pieces."""
    lengths: list[int] = []
    take, in_pieces = Prompts.take, Prompts.read

    def taken(self: Any, row: int, call: Any, before_steps: Any) -> Any:
        lengths.append(call.input_ids.shape[1])
        return take(self, row, call, before_steps)

    def begun(self: Any, row: int, prompt_ids: np.ndarray) -> None:
        lengths.append(len(prompt_ids))
        in_pieces(self, row, prompt_ids)

    monkeypatch.setattr(Prompts, "take", taken)
    monkeypatch.setattr(Prompts, "read", begun)
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    return lengths


@pytest.mark.parametrize("num_new", [1, 12])
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("siblings", [1, 5], ids=["requests", "texts of one request"])
def test_a_prompt_is_read_once(
    model: Any, read: list[int], siblings: int, slots: int, num_new: int
) -> None:
    own = {"do_sample": True, "num_return_sequences": siblings, "max_new_tokens": num_new}
    config = settings(model, **own)
    found = model.generate_batch([LONG] * (5 // siblings), config, seeded(), max_slots=slots)
    assert [output.generated_tokens for output in found.values()] == [
        alone(model, LONG, config, index) for index in range(5)
    ]
    assert read == [len(LONG)]
    if num_new == 1:
        stats = [output.speculative_stats for output in found.values()]
        assert [each.num_fed for each in stats] == [len(LONG), 0, 0, 0, 0]


@pytest.mark.parametrize("num_new", [1, 12])
@pytest.mark.parametrize("slots", [2, 3, 6])
def test_a_prompt_is_read_once_in_pieces(
    model: Any, read: list[int], slots: int, num_new: int
) -> None:
    short, config = prompts(1, longest=4)[0], settings(model, max_new_tokens=40)
    given = [short, *[{"input_ids": LONG, "max_new_tokens": num_new}] * 5]
    found = model.generate_batch(given, config, max_slots=slots).values()
    long = alone(model, LONG, settings(model, max_new_tokens=num_new))
    expected = [alone(model, short, config), *[long] * 5]
    assert [each.generated_tokens for each in found] == expected
    # Layers with a window drop the end of a prompt as the text behind it grows.
    has_windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    times = {2: 3, 3: 2}.get(slots, 1) if has_windows and num_new > 1 else 1
    assert read[1:] == times * [len(LONG)]
    speculated(found)


def test_what_other_weights_have_read_is_not_shared(read: list[int]) -> None:
    model = lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)
    (text,), config = prompts(1), settings(model, max_new_tokens=30)
    before = alone(model, text, config)
    with requests.running(model, config, max_slots=4) as manager:
        manager.add_request(text, max_new_tokens=400, request_id="long", streaming=True)
        assert manager.get_result(timeout=WAIT).request_id == "long"
        with manager.pause(), torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.mul_(-1)
            name = manager.add_request(text)
        found = requests.result_of_another(manager, "long")
    assert (found.request_id, read) == (name, [len(text)] * 2)
    assert found.generated_tokens == alone(model, text, config) != before
    speculated([found])


def test_a_prompt_that_is_read_when_weights_change_begins_again(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)
    short, config = prompts(1, longest=4)[0], settings(model, max_new_tokens=30)
    launch, seen = Prompts.launch, []

    def changed(self: Any, rows: Any, draft: Any) -> Any:
        if self.reading:
            seen.append(int(self._texts.slots.lengths[1]))
            if len(seen) == 3:  # in the middle of a pause, for all that the run can tell
                with torch.no_grad():
                    for layer in model.model.layers:
                        layer.mlp.down_proj.weight.mul_(-1)
                self.renew()
        return launch(self, rows, draft)

    monkeypatch.setattr(Prompts, "launch", changed)
    found = list(model.generate_batch([short, LONG], config, max_slots=2).values())
    assert seen == [0, 8, 16, 8, 16, 24, 32]
    assert found[1].generated_tokens == alone(model, LONG, config)
    speculated(found)

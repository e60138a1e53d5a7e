"""Requests that are cancelled, before, while and after their texts are written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lookahead_hf
from lookahead_hf.queue import scheduler
from lookahead_hf.queue.scheduler import Prompts
from lookahead_hf.queue.session import QueueSession
from tests.helpers import models
from tests.helpers.requests import (
    DRAFTED,
    WAIT,
    alone,
    prompts,
    results,
    running,
    seeded,
    settings,
    speculated,
)


class Steps:
    """Rows that decode in every step, and what is called as the sixth step begins."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.sixth: Callable[[], object] = lambda: None


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    found, launch = Steps(), QueueSession.launch

    def counted(self: Any, draft: Any) -> Any:
        found.live.append(int(self.rows.live.sum()))
        if len(found.live) == 6:
            found.sixth()
        return launch(self, draft)

    monkeypatch.setattr(QueueSession, "launch", counted)
    return found


def whole_result(manager: Any) -> Any:
    """The first result of a text that has ended."""
    while not (output := manager.get_result(timeout=WAIT)).is_finished():
        pass
    return output


def test_a_request_leaves_in_the_middle_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)
    monkeypatch.setattr(scheduler, "CHUNK", 1)
    config = settings(model, max_new_tokens=30)
    first, long, last = prompts(1, longest=4)[0], (prompts(1, 3)[0] * 30)[:90], prompts(2)[1]
    manager = model.init_continuous_batching(config, seeded(), max_slots=2)
    read = Prompts.read

    def cancelled(self: Any, row: int, prompt_ids: np.ndarray) -> None:
        read(self, row, prompt_ids)
        if len(prompt_ids) == len(long):
            manager.cancel_request("long")

    monkeypatch.setattr(Prompts, "read", cancelled)
    for name, text in {"first": first, "long": long, "last": last}.items():
        manager.add_request(text, request_id=name)
    manager.start()
    found = results(manager, 2)
    manager.stop()
    assert set(found) == {"first", "last"}
    for name, text in {"first": first, "last": last}.items():
        assert found[name].generated_tokens == alone(model, text, config)


def test_all_texts_of_a_request_end_before_the_next_step(model: Any, steps: Steps) -> None:
    config = settings(model, max_new_tokens=200, do_sample=True, num_return_sequences=5)
    text, other = prompts(2)
    with running(model, config, max_slots=3) as manager:

        def cancel() -> None:
            manager.cancel_request("many")
            manager.add_request(other, request_id="next", max_new_tokens=1)

        steps.sixth = cancel
        manager.add_request(text, request_id="many")
        found = results(manager, 5)
        manager.stop()
    assert manager.get_result(timeout=0) is None
    assert set(found) == {*(f"next__child#{child}" for child in range(4)), "next"}
    assert steps.live == [3] * 6


@pytest.mark.parametrize("cancelled", ["many__child#0", "many__child#2"], ids=["row", "queue"])
def test_one_text_of_a_request_is_cancelled(model: Any, steps: Steps, cancelled: str) -> None:
    config = settings(model, do_sample=True, num_return_sequences=4, max_new_tokens=60)
    (text,) = prompts(1)
    names = [*(f"many__child#{child}" for child in range(3)), "many"]
    with running(model, config, max_slots=2) as manager:
        steps.sixth = lambda: manager.cancel_request(cancelled)
        manager.add_request(text, request_id="many")
        found = results(manager, 3)
        manager.stop()
    assert manager.get_result(timeout=0) is None
    assert {name: output.generated_tokens for name, output in found.items()} == {
        name: alone(model, text, config, index)
        for index, name in enumerate(names)
        if name != cancelled
    }
    speculated(found.values())


def test_waiting_texts_are_cancelled_and_the_others_keep_their_seeds(model: Any) -> None:
    config, texts = settings(model, do_sample=True, num_return_sequences=2), prompts(3)
    manager = model.init_continuous_batching(config, seeded(), max_slots=1)
    for name, text in zip("abc", texts, strict=True):
        manager.add_request(text, request_id=name)
    manager.cancel_request("a__child#0")
    manager.cancel_request("b")
    manager.start()
    found = results(manager, 3)
    manager.stop()
    assert manager.get_result(timeout=0) is None
    assert {name: output.generated_tokens for name, output in found.items()} == {
        "a": alone(model, texts[0], config, 1),
        "c__child#0": alone(model, texts[2], config, 4),
        "c": alone(model, texts[2], config, 5),
    }
    speculated(found.values())


def test_an_id_that_is_used_again_while_its_text_is_written_is_answered(
    model: Any, steps: Steps
) -> None:
    config, (old, new) = settings(model, max_new_tokens=60), prompts(2)
    with running(model, config, max_slots=3) as manager:

        def again() -> None:
            manager.cancel_request("same")
            manager.add_request(new, request_id="same")

        steps.sixth = again
        manager.add_request(old, request_id="same", streaming=True)
        found = whole_result(manager)
        manager.stop()
    assert manager.get_result(timeout=0) is None
    assert found.generated_tokens == alone(model, new, config)
    speculated([found])


def test_a_handler_hears_of_the_request_that_it_was_registered_for(model: Any) -> None:
    config, (old, new) = settings(model, max_new_tokens=4), prompts(2)
    heard: list[Any] = []

    async def ask(manager: Any) -> None:
        manager.register_result_handler("same", heard.append)
        manager.add_request(old, request_id="same", record_timestamps=True)
        manager.add_request(old, request_id="later")
        manager.get_result("later", timeout=WAIT)  # what the loop still has to hear of is ready
        manager.cancel_request("same")
        manager.register_result_handler("same", heard.append)
        manager.add_request(new, request_id="same")
        while not heard:
            await asyncio.sleep(0.001)

    with running(model, config, max_slots=1) as manager:
        asyncio.run(asyncio.wait_for(ask(manager), WAIT))
        assert not manager._handlers
    assert [output.generated_tokens for output in heard] == [alone(model, new, config)]

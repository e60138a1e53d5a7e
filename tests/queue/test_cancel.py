"""Requests that are cancelled, before, while and after their texts are written."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from lookahead_hf.queue import scheduler
from lookahead_hf.queue.scheduler import Prompts
from tests.helpers.requests import WAIT, alone, prompts, results, running, settings, speculated


def test_a_request_leaves_in_the_middle_of_its_prompt(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CHUNK", 1)
    config = settings(model, max_new_tokens=30)
    long = (prompts(1, 3)[0] * 30)[:90]
    texts = {"first": prompts(1, longest=4)[0], "long": long, "last": prompts(2)[1]}
    read = Prompts.read

    def cancelled(self: Any, row: int, prompt_ids: np.ndarray) -> None:
        read(self, row, prompt_ids)
        if len(prompt_ids) == len(long):
            manager.cancel_request("long")

    monkeypatch.setattr(Prompts, "read", cancelled)
    with running(model, config) as manager:
        with manager.pause():
            for name, text in texts.items():
                manager.add_request(text, request_id=name)
        found = results(manager, 2)
    assert {name: output.generated_tokens for name, output in found.items()} == {
        name: alone(model, texts[name], config) for name in ("first", "last")
    }


def test_all_texts_of_a_request_end_before_the_next_step(model: Any, live: Any) -> None:
    config = settings(model, max_new_tokens=200, do_sample=True, num_return_sequences=5)
    text, other = prompts(2)
    with running(model, config, max_slots=3) as manager:

        def cancel() -> None:
            manager.cancel_request("many")
            manager.add_request(other, request_id="next", max_new_tokens=1)

        live.sixth = cancel
        manager.add_request(text, request_id="many")
        found = results(manager, 5)
        manager.stop()
    assert manager.get_result(timeout=0) is None
    assert set(found) == {*(f"next__child#{child}" for child in range(4)), "next"}
    assert live == [3] * 6


@pytest.mark.parametrize("cancelled", ["many__child#0", "many__child#2"], ids=["row", "queue"])
def test_one_text_of_a_request_is_cancelled(model: Any, live: Any, cancelled: str) -> None:
    config = settings(model, do_sample=True, num_return_sequences=4, max_new_tokens=60)
    (text,) = prompts(1)
    names = [*(f"many__child#{child}" for child in range(3)), "many"]
    with running(model, config, max_slots=2) as manager:
        live.sixth = lambda: manager.cancel_request(cancelled)
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
    with running(model, config, max_slots=1) as manager:
        with manager.pause():
            for name, text in zip("abc", texts, strict=True):
                manager.add_request(text, request_id=name)
            manager.cancel_request("a__child#0")
            manager.cancel_request("b")
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
    model: Any, live: Any
) -> None:
    config, (old, new) = settings(model, max_new_tokens=60), prompts(2)
    with running(model, config, max_slots=3) as manager:

        def again() -> None:
            manager.cancel_request("same")
            manager.add_request(new, request_id="same")

        live.sixth = again
        manager.add_request(old, request_id="same", streaming=True)
        while not (found := manager.get_result(timeout=WAIT)).is_finished():
            pass
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

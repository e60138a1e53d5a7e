"""Large requests: they are read beside the event loop, or refused before that."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from lookahead_hf import SpeculativeConfig
from lookahead_hf.tools.serving import checks
from lookahead_hf.tools.serving.checks import CHAT, COMPLETIONS, RESPONSES
from lookahead_hf.tools.serving.fields import ANY, USUAL
from tests.helpers.served import Served, joined


@contextmanager
def reading(served: Served) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events that say that a prompt is being read, and let that go on."""
    (timed,) = served.server._model_manager.loaded_models.values()
    begun, goes_on, tokenizer = threading.Event(), threading.Event(), type(timed.processor)
    read = tokenizer.apply_chat_template

    def wait(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return read(*args, **kwargs)

    with mock.patch.object(tokenizer, "apply_chat_template", wait):
        yield begun, goes_on


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_answers_while_a_prompt_is_read(served: Served, stream: bool) -> None:
    expected = served.text()
    with reading(served) as (begun, goes_on), ThreadPoolExecutor(1) as client:
        asked = client.submit(lambda: joined(served.ask(stream=True)) if stream else served.text())
        assert begun.wait(60)
        assert "ok" in served.get("/health")
        goes_on.set()
        assert asked.result(60) == expected


def test_nothing_is_kept_of_a_client_that_leaves_meanwhile(served: Served) -> None:
    from openai import APITimeoutError

    running = served.server._generation_state.get_manager.__self__
    assert len(served.text(max_tokens=4)) == 4
    with reading(served) as (_, goes_on):
        with pytest.raises(APITimeoutError):
            served.ask(stream=True, timeout=0.5)
        time.sleep(0.5)
        goes_on.set()
        running.readers.submit(time.sleep, 0.5).result()
    assert not running.queue._handlers and not running.queue.engine.waiting


@pytest.mark.parametrize("name", ["messages", "prompt", "input"])
def test_a_text_that_cannot_fit_is_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (timed,) = served.server._model_manager.loaded_models.values()
    monkeypatch.setattr(type(timed.processor), "__call__", None)
    text = "x" * (5 * 2048 + 1)  # where no token has more than the five characters of <pad>
    value = [{"role": "user", "content": text}] if name == "messages" else text
    path = {"messages": CHAT, "input": RESPONSES}.get(name, COMPLETIONS)
    status, answer = served.post(path, {name: value})
    assert status == 400 and "needs more than the 2048 tokens" in answer


def test_a_body_has_so_many_values(served: Served) -> None:
    status, answer = served.post(COMPLETIONS, {"prompt": "x", "user": [[]] * checks.MOST_VALUES})
    assert status == 400 and "100000 commas and brackets at most" in answer


def test_requests_of_one_body_share_it() -> None:
    body = json.dumps({"prompt": ["a" * 99, "b"], "n": 2, "user": "y" * 99, "seed": 1}).encode()
    given = SpeculativeConfig(), "m", USUAL, {}, ANY
    requests, num_prompts = checks.take_requests(COMPLETIONS, body, *given)
    bodies = [request.body or {} for request in requests]
    assert num_prompts == 2 and [each["prompt"][0] for each in bodies] == ["a", "a", "b", "b"]
    assert bodies[0]["prompt"] is bodies[1]["prompt"]
    assert len({id(each["user"]) for each in bodies}) == 1
    assert len({request.seed for request in requests}) == 4
    assert len({id(request.places) for request in requests}) == 4
    assert len({id(request.group) for request in requests}) == 1

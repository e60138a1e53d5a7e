"""The fields of speculation in a request's body, and in an answer's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lookahead_hf import SpeculativeConfig, SpeculativeStats
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.serving.answers import Answer, Reply, TextEnd
from lookahead_hf.tools.serving.checks import CHAT, check_fields, take_request
from lookahead_hf.tools.serving.fields import ServedRequest

POOL, OTHER = NgramPool(64), NgramPool(64)
SERVER = SpeculativeConfig(budget=4, pool=POOL)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        (False, False),
        (True, SERVER),
        ({"budget": 2}, SpeculativeConfig(budget=2, pool=POOL)),
        ({"drafters": ["ngram", "pool"]}, SpeculativeConfig(drafters=("ngram", "pool"), pool=POOL)),
        ({"drafters": ["ngram"]}, SpeculativeConfig(drafters=("ngram",))),
        ({"pool": "other", "budget": 2}, SpeculativeConfig(budget=2, pool=OTHER)),
        ({"pool": "other", "drafters": "ngram"}, SpeculativeConfig(drafters="ngram", pool=OTHER)),
        ("recycling", SpeculativeConfig(drafters=("recycling",))),
    ],
)
def test_a_request_switches_speculation(asked: Any, expected: Any) -> None:
    body = {"model": "m", "speculative": asked}
    assert take_request(body, SERVER, pools={"other": OTHER}).speculative == expected
    assert body == {"model": "m"}


def test_a_prediction_is_a_string_or_parts() -> None:
    for content in "ab\n", [{"type": "text", "text": each} for each in ("a", "b\n")]:
        body = {"prediction": {"type": "content", "content": content}}
        assert take_request(body, SERVER).prediction == "ab\n" and body == {}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("speculative", "fast", "known: default, prompt_lookup"),
        ("speculative", 1, "give True, False, one of default"),
        ("speculative", {"budget": -1}, r"an int in 0\.\.64"),
        ("speculative", {"pool": "/etc/passwd"}, "--pool NAME=FILE"),
        ("speculative", {"options": {"pool": {"pool": "other"}}}, "--pool NAME=FILE"),
        ("speculative", {"learn": True}, '"learn": true'),
        ("speculative", {"options": {"medusa": {"path": "/etc"}}}, '"medusa": {"path": FILE}'),
        ("prediction", "text", "prediction='text' is not served: Input should be a valid dict"),
        ("prediction", {"type": "content"}, "content is missing"),
        ("prediction", {"type": "content", "content": [{"type": "image"}]}, "should be 'text'"),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], field: value}
    with pytest.raises(ValueError, match=allowed):
        check_fields(CHAT, body, "m")
        take_request(body, SERVER)


def sent(events: bytes, request: ServedRequest) -> bytes:
    """What a client gets of a stream."""
    messages: list[Any] = []

    async def answer() -> None:
        async def send(message: Any) -> None:
            messages.append(message)

        reply = Reply(request, send, Answer([request]), holds=False)
        headers = [(b"content-type", b"text/event-stream")]
        await reply({"type": "http.response.start", "status": 200, "headers": headers})
        await reply({"type": "http.response.body", "body": b"", "more_body": True})
        request.refusal = 'a "quoted" word'
        await reply({"type": "http.response.body", "body": events, "more_body": False})

    asyncio.run(answer())
    return b"".join(each["body"] for each in messages[1:])


def test_events_of_a_stream() -> None:
    for events in (
        b'data: {"choices": [{"text": "\\"usage\\""}]}\n\n',
        b'data: {"usage": null}\n\n',
        b'data: "usage"\n\ndata: [DONE]\n\n',
        b': "usage"\n\n',
    ):
        assert sent(events, ServedRequest(stats=SpeculativeStats())) == events
    events = b'data: {"error": "a "quoted" word"}\n\n'
    said = json.loads(sent(events, ServedRequest())[6:])
    assert said["error"]["message"] == 'a "quoted" word'


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_text_is_cut_before_its_first_end_however_it_comes(size: int) -> None:
    text, end = "one, two, threefour five", TextEnd(("xx", "three four", "fourx", "four", "ve"))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown = [end.feed(each, False) for each in pieces]
    assert "".join(shown) + end.feed("", True) == "one, two, three"
    other = TextEnd(("five!",))
    assert "".join([other.feed(text, False), other.feed("", True)]) == text

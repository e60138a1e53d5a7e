"""Requests that nobody would write: each is answered or refused in a sentence, none fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from lookahead_hf.tools.serving import checks
from lookahead_hf.tools.serving.answers import FAILED
from lookahead_hf.tools.serving.checks import CHAT, COMPLETIONS, RESPONSES
from tests.helpers.served import Served

WORD = st.text(max_size=6)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORD,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(WORD, each, max_size=2),
    max_leaves=4,
)
SCHEMA = st.sampled_from([{"type": "integer"}, {"type": "object"}, {"enum": ["a"]}, {"type": 5}])
TOOL = st.fixed_dictionaries({"name": WORD}, optional={"parameters": SCHEMA | ANY})
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])}, optional={"text": ANY}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "x"]), "content": WORD | ANY}
) | st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(PART, max_size=2)})
NUMBER = st.floats(-3, 3) | st.integers(-3, 30)
TOKENS = st.lists(st.integers(0, 300), max_size=3)
PAIR = st.tuples(st.integers(0, 9) | TOKENS, NUMBER)
VALUE = NUMBER | st.booleans() | TOKENS | PAIR | st.lists(TOKENS | PAIR, max_size=2) | ANY
NAMES = st.sampled_from(sorted(checks.SETTINGS.model_fields))
SETTINGS = st.dictionaries(NAMES, st.integers(0, 300) | VALUE, max_size=3)
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "n", "seed", "top_logprobs"), NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), NUMBER),
    **dict.fromkeys(("stream", "logprobs", "echo", "speculative"), st.booleans()),
    "stop": WORD | st.lists(WORD, max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), NUMBER, max_size=2),
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": TOOL})),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "response_format": st.fixed_dictionaries(
        {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": SCHEMA})}
    ),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": WORD}),
    "generation_config": SETTINGS.map(json.dumps),
    "chat_template_kwargs": st.dictionaries(WORD, ANY, max_size=1),
    "model": WORD,
}
LENGTH = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
NEEDED: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    CHAT: ("messages", st.lists(MESSAGE, max_size=2)),
    COMPLETIONS: ("prompt", WORD | st.lists(WORD, max_size=2)),
    RESPONSES: ("input", WORD | st.lists(MESSAGE, max_size=2)),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body, most of whose fields have values of the right type."""
    path = draw(st.sampled_from([CHAT, CHAT, COMPLETIONS, RESPONSES]))
    name, values = NEEDED[path]
    known = sorted({*OPTIONAL, *checks.SCHEMAS[path].model_fields, *checks.REFUSED[path]})
    names = draw(st.lists(st.sampled_from(known), max_size=4, unique=True))
    body = {each: draw(OPTIONAL.get(each, ANY) | ANY) for each in names}
    body[name] = draw(values | ANY)
    return path, {**body, LENGTH[path]: draw(st.integers(-1, 6))}


def test_no_request_fails_the_server(served: Served, request: pytest.FixtureRequest) -> None:
    count, text = request.config.getoption("--requests"), served.text(max_tokens=4)

    @examples(max_examples=count, deadline=None, suppress_health_check=[*HealthCheck])
    @given(requests())
    def ask(asked: tuple[str, dict[str, Any]]) -> None:
        status, answer = served.post(*asked)
        assert status < 500 and FAILED not in answer and "server_error" not in answer
        if status >= 400:
            message = json.loads(answer)["error"]["message"]
            assert 0 < len(message) < 900 and "Traceback" not in message

    ask()
    assert served.text(max_tokens=4) == text

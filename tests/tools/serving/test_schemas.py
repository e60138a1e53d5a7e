"""Answers of transformers' server that obey the schema of their request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lookahead_hf import SpeculativeConfig, totals
from tests.helpers.grammars import LEVEL, schema
from tests.helpers.served import Served, joined, serving
from tests.helpers.tiny_chat import DRAFTING

SCHEMAS = (
    schema(country={"const": "Great Britain"}, level=LEVEL),
    schema(level=LEVEL, is_open={"type": "boolean"}),
)


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "together"])
def served(folder: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    config = SpeculativeConfig(**DRAFTING)
    with serving(folder, config, continuous_batching=request.param) as served:
        yield served


def asking(number: int) -> dict[str, Any]:
    """The fields of a request for JSON of one of the schemas."""
    named = {"name": "record", "schema": SCHEMAS[number], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 90}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_obey_the_schemas_of_their_requests(served: Served, stream: bool) -> None:
    def answer(number: int) -> str:
        if not stream:
            return served.text(**asking(number))
        return joined(served.ask(stream=True, **asking(number)))

    before = totals(served.model).stats.num_accepted
    with ThreadPoolExecutor(2) as clients:
        texts = [*clients.map(answer, range(2))]
    record, flag = map(json.loads, texts)
    assert texts[0] == served.plain(**asking(0))
    assert record["country"] == "Great Britain" and record["level"] in LEVEL["enum"]
    assert flag["is_open"] in (True, False) and list(flag) == ["level", "is_open"]
    assert totals(served.model).stats.num_accepted > before + 20
    assert not totals(served.model).fallbacks


def test_formats_without_a_schema(served: Served) -> None:
    assert served.text(response_format={"type": "text"}) == served.text()
    assert served.text(response_format={"type": "json_object"}, max_tokens=40).startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "cannot be compiled: "),
        ({"type": "json_schema", "json_schema": {"name": "record"}}, "schema is missing"),
        ({"type": "json_schema", "json_schema": None}, "has no schema: give one"),
        ({"type": "yaml"}, "tag 'yaml' found"),
        ("json", "should be a valid dictionary"),
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_a_bad_request(
    served: Served, asked: Any, said: str, stream: bool
) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match=said):
        list(served.ask(stream=stream, extra_body={"response_format": asked}))

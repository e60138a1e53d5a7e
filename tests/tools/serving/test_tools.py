"""Answers of transformers' server that have to call a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer

from lookahead_hf import SpeculativeConfig, structured, totals
from lookahead_hf.tools.serving.fields import ServedRequest
from lookahead_hf.tools.serving.schemas import calling, compile_task, for_calls, take_tools
from tests.helpers import grammars
from tests.helpers.grammars import LEVEL, schema
from tests.helpers.served import Served, save_ascii_chat, serving
from tests.helpers.tiny_chat import DRAFTING

WEATHER = {"name": "weather", "parameters": schema(level=LEVEL, is_open={"type": "boolean"})}
PLACE = {
    "name": "place",
    "parameters": {**schema(at={"$ref": "#/$defs/c"}), "$defs": {"c": {"const": "Great Britain"}}},
}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, PLACE)]
WRONG = {"type": "function", "function": {"name": "a", "parameters": {"type": 7}}}
ONE = {"type": "function", "function": {"name": "place"}}
TEMPLATE = {
    "start_anchor": "<end>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


@pytest.fixture(
    scope="module", params=[(True, TEMPLATE), (False, None)], ids=["together", "form not known"]
)
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    together, template = request.param
    folder = save_ascii_chat(tmp_path_factory.mktemp("model"))
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.response_template = template
        tokenizer.save_pretrained(folder)
    config = SpeculativeConfig(**DRAFTING)
    with serving(folder, config, continuous_batching=together) as served:
        yield served


def called(served: Served, stream: bool, **fields: Any) -> Any:
    """The function that an answer calls, and why the answer ended."""
    given = {"tools": TOOLS, "max_tokens": 120, "stream": stream, **fields}
    if not stream:
        (choice,) = served.ask(**given).choices
        (call,) = choice.message.tool_calls
        return call.function, choice.finish_reason
    choices = [choice for piece in served.ask(**given) for choice in piece.choices]
    (call,) = [each for choice in choices for each in choice.delta.tool_calls or ()]
    return call.function, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", ONE], ids=["any", "named"])
def test_an_answer_calls_a_tool(served: Served, choice: Any, stream: bool) -> None:
    before = totals(served.model).stats.num_accepted
    function, why = called(served, stream, tool_choice=choice)
    arguments = json.loads(function.arguments)
    if choice == ONE or function.name == "place":
        assert function.name == "place" and arguments == {"at": "Great Britain"}
    else:
        assert function.name == "weather" and arguments["level"] in LEVEL["enum"]
    assert why == "tool_calls"
    served.wait_until_idle()  # a stream ends before its statistics are counted
    assert totals(served.model).stats.num_accepted > before + 20
    assert not totals(served.model).fallbacks


@pytest.mark.parametrize("stream", [False, True])
def test_the_api_for_responses(served: Served, stream: bool) -> None:
    tools = [{"type": "function", **each} for each in (WEATHER, PLACE)]
    given = {"model": served.folder, "input": "def f(x):", "max_output_tokens": 120}
    given |= {"tools": tools, "tool_choice": {"type": "function", "name": "place"}}
    answer = served.client.responses.create(stream=stream, **given)
    if stream:
        answer = [event for event in answer if event.type == "response.completed"][-1].response
    (call,) = [each for each in answer.output if each.type == "function_call"]
    assert call.name == "place" and json.loads(call.arguments) == {"at": "Great Britain"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "required", "tools": None}, "is not served with the tools \\[\\]"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'weather', 'place'"),
        ({"tool_choice": {"type": "function", "function": "place"}}, "is not served with"),
        ({"tool_choice": "required", "tools": [WRONG]}, "of a tool cannot be compiled"),
    ],
)
def test_what_cannot_be_called_is_a_bad_request(
    served: Served, fields: dict[str, Any], said: str, stream: bool
) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match=said):
        list(served.ask(stream=stream, extra_body={"tools": TOOLS, **fields}))


def test_an_answer_that_ends_within_a_call_is_a_bad_request(served: Served) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="ends within a tool's call: allow more tokens"):
        served.ask(tools=TOOLS, tool_choice="required", max_tokens=40)


def test_what_asks_for_no_call() -> None:
    for choice in (None, "auto", "none"):
        assert take_tools({"tools": TOOLS, "tool_choice": choice}) is None
    nothing = {"tools": [{"name": "stop"}], "tool_choice": "required"}
    assert take_tools(nothing) == {"stop": {"type": "object"}}


LINE = '{"name": "stop", "arguments": {}}\n'
CALL = f"<tool_call>\n{LINE}</tool_call>"


@pytest.mark.parametrize(
    ("model_type", "prompt", "text", "is_right"),
    [
        ("gemma4", "a", LINE, True),
        ("qwen3_5", "a <think>\n", f"well</think>\n\n{LINE}", True),
        ("qwen3", "a", CALL, True),
        ("qwen3", "a", f"<think>well, <tool</think>\n\n{CALL}", True),
        ("qwen3", "a", "well</think>", False),
        ("qwen3", "a <think>\n", f"well</think>\n\n{CALL}", True),
        ("qwen3", "a <think>\n\n</think>\n\n", CALL, True),
        ("qwen3", "a", "Certainly", False),
    ],
)
def test_reasoning_comes_before_a_call(
    model_type: str, prompt: str, text: str, is_right: bool
) -> None:
    tokenizer, request = grammars.tokenizer(), ServedRequest(tools={"stop": schema()})
    ends = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)
    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type), generation_config=ends)
    assert for_calls(tokenizer, model, request).response_template == request.template
    assert request.tools is not None and request.template is not None
    task = calling(request.tools, request.template, tokenizer, tokenizer.encode(prompt))
    own = structured.compiled("a call", task, tokenizer, compile_task)
    matcher = xgrammar.GrammarMatcher(own.compiled_grammars[0])
    assert matcher.accept_string(text) == is_right
    assert matcher.is_completed() == is_right

"""Schemas of answers and calls of tools in the server's requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lookahead_hf.tools.serving.checks import shown
from lookahead_hf.tools.serving.compiling import compile_task, trials
from lookahead_hf.tools.serving.fields import ServedRequest


def take_tools(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tools of which the answer has to call one.

    Args:
        body: The request, whose `tool_choice` transformers' server ignores.

    Returns:
        The JSON schema of each tool's parameters, by name; None if the answer need not call any.

    Raises:
        ValueError: `tool_choice` is not understood, or names a tool that the request lacks.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    tools = _functions(body.get("tools"))
    if choice == "required" and tools:
        return tools
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in tools:
        return {name: tools[name]}
    raise ValueError(
        f"tool_choice={shown(choice)} is not served with the tools {shown(list(tools))}: give "
        '"required" with tools, {"type": "function", "function": {"name": NAME}} with one of them, '
        '"auto" or "none"'
    )


def _functions(tools: Any) -> dict[str, Any]:
    """Return the parameters of functions by name, from the form of either API."""
    given = tools if isinstance(tools, list) else []
    each = (tool.get("function", tool) for tool in given if isinstance(tool, Mapping))
    named = [function for function in each if isinstance(function, Mapping)]
    any_object = {"type": "object"}
    return {
        function["name"]: function.get("parameters") or any_object
        for function in named
        if isinstance(function.get("name"), str)
    }


def calling(tools: Mapping[str, Any], model: Any, tokenizer: Any, prompt: Any) -> dict[str, Any]:
    """Return the task to compile a grammar of answers that call a tool, after any reasoning.

    Without markers that are known, the answer is the JSON of the call alone.

    Args:
        tools: The JSON schema of each tool's parameters, by name.
        model: The model, whose markers transformers' server knows.
        tokenizer: Its tokenizer, or the processor that has it.
        prompt: The tokens of the prompt, [length] or [1, length].
    """
    fields = _fields(model, tokenizer)
    markers = _markers(fields.get("tool_calls", {})) or ()
    thinking = fields.get("reasoning_content", {})
    begins = isinstance(thinking.get("open"), str) and isinstance(thinking.get("close"), str)
    text = tokenizer.decode(_last(prompt))
    return {
        "tools": dict(tools),
        "markers": list(markers),
        "thinking": [thinking["open"], thinking["close"]] if begins else None,
        "thinks": begins and text.rstrip().endswith(thinking["open"].rstrip()),
    }


def _last(prompt: Any) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    ids = ids[0] if ids and isinstance(ids[0], list) else ids
    return list(ids[-16:])


def _fields(model: Any, tokenizer: Any) -> Mapping[str, Any]:
    """Return how transformers' server parses a model's answer."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return {}
    template = get_response_template(tokenizer, model)
    return template.get("fields", {}) if isinstance(template, Mapping) else {}


def _markers(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the markers around the JSON of a call, None if a call has another form."""
    pattern = field.get("open_pattern", "")
    begin, end = field.get("open", pattern.removeprefix(r"\s*")), field.get("close")
    is_whole = field.get("transform") == {"type": "function", "function": "{content}"}
    is_json = field.get("content") == "json" and "content_args" not in field
    if not (is_json and is_whole and isinstance(begin, str) and isinstance(end, str)):
        return None
    return (begin, end) if not pattern or re.fullmatch(pattern, begin) else None


_TEXT = ("input_ids", "attention_mask", "token_type_ids")
"""Arguments of a generation that hold text."""


def take_schema(body: dict[str, Any]) -> str | None:
    """Take the answer's format, which transformers' server ignores, out of a request's body.

    Args:
        body: The request, which loses `response_format`, or `format` of the Responses API's `text`.

    Returns:
        The text of a JSON schema, None for any text.

    Raises:
        ValueError: The format is not known.
    """
    text = body.get("text")
    of_text = text.pop("format", None) if isinstance(text, dict) else None
    if text == {}:
        del body["text"]
    of_body = body.pop("response_format", None)
    asked: Any = of_text if of_body is None else of_body
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if asked is None or kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    named = asked.get("json_schema", asked) if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(
            f"response_format={shown(asked)} is not understood: give "
            '{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}, '
            '{"type": "json_object"} or {"type": "text"}'
        )
    return json.dumps(schema)


def grammar_of(
    request: ServedRequest, prompt: Any, model: Any, tokenizer: Any, seconds: float
) -> Any:
    """Return the logits processor of a request's schema or tools, None if it has neither.

    Args:
        request: The request.
        prompt: The tokens of the prompt, [length] or [1, length].
        model: The model.
        tokenizer: Its tokenizer, or the processor that has it.
        seconds: The longest time to compile.

    Raises:
        ValueError: A schema cannot be compiled, or not in time, xgrammar is not installed, or the
            model's way to call tools is unknown, outside of chat completions.
    """
    if request.schema is None and request.tools is None:
        return None
    try:
        from lookahead_hf import structured
    except ImportError as error:
        raise ValueError(f"response_format and tool_choice: {error}") from error
    what, task = "the JSON schema", {"schema": request.schema}
    if request.tools is not None:
        what = "the parameters of a tool"
        task = calling(request.tools, model, tokenizer, prompt)
        request.writes_call = not task["markers"]
        if request.writes_call and not request.is_chat:
            raise ValueError(
                "tool_choice: how this model writes a call is not known: use the chat completions, "
                'or "auto"'
            )
    try:
        told = structured.vocabulary(tokenizer)
        trials.run(told, task, lambda: request.is_cancelled, seconds)
    except ValueError as error:
        raise ValueError(f"{what} cannot be compiled: {error}") from error
    return structured.compiled(what, task, tokenizer, compile_task)


def check_media(request: ServedRequest, given: Mapping[str, Any]) -> None:
    """Raise ValueError if the arguments of a generation lack what the messages hold."""
    has_media = any(hasattr(value, "shape") for name, value in given.items() if name not in _TEXT)
    if request.media is not None and not has_media:
        raise ValueError(f"{request.media}: this model reads text alone, so leave that part out")

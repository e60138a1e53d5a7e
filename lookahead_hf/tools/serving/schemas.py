"""Schemas of answers and calls of tools in the server's requests."""

from __future__ import annotations

import copy
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
    given = [tool.get("function") or tool for tool in body.get("tools") or ()]
    any_object = {"type": "object"}
    named = [function for function in given if function.get("name") is not None]
    tools = {each["name"]: each.get("parameters") or any_object for each in named}
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


CALLS: Mapping[str, Any] = {
    "open_pattern": r'\s*\{"name": "(?P<name>[^"]*)", "arguments": ',
    "close": "}\n",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
"""The form of calls for a model whose own form is not known: a line of JSON."""


def for_calls(processor: Any, model: Any, request: ServedRequest | None) -> Any:
    """Return the processor with which transformers' server reads the answer to a request.

    If the answer has to call a tool, it is a copy whose template finds the call that the grammar
    lets the model write, in the model's own form if that is JSON between markers.
    """
    if request is None or request.tools is None:
        return processor
    from transformers.cli.serving.utils import get_response_template

    called = copy.copy(processor)
    if hasattr(processor, "tokenizer"):
        called.tokenizer = copy.copy(processor.tokenizer)
    tokenizer = getattr(called, "tokenizer", called)
    template = get_response_template(processor, model) or _any_text(model, tokenizer)
    if _markers(template["fields"].get("tool_calls", {})) is None:
        template = {**template, "fields": {**template["fields"], "tool_calls": CALLS}}
    request.template = tokenizer.response_template = template
    return called


def _any_text(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the template of answers that are a text up to an end token."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or ()
    found = "|".join(re.escape(tokenizer.decode([token])) for token in ends)
    text = {"content": "text", **({"close_pattern": found} if found else {})}
    return {"start_anchor_pattern": r"\Z", "fields": {"content": text}}


def calling(
    tools: Mapping[str, Any], template: Mapping[str, Any], tokenizer: Any, prompt: Any
) -> dict[str, Any]:
    """Return the task to compile a grammar of answers that call a tool, after any reasoning.

    Args:
        tools: The JSON schema of each tool's parameters, by name.
        template: How the server finds the call.
        tokenizer: The model's tokenizer, or the processor that has it.
        prompt: The tokens of the prompt, [length] or [1, length].
    """
    thinking = template["fields"].get("reasoning_content", {})
    begins = isinstance(thinking.get("open"), str) and isinstance(thinking.get("close"), str)
    text = tokenizer.decode(_last(prompt))
    return {
        "tools": dict(tools),
        "markers": _markers(template["fields"]["tool_calls"]) or ("", "\n"),
        "thinking": [thinking["open"], thinking["close"]] if begins else None,
        "thinks": begins and text.rstrip().endswith(thinking["open"].rstrip()),
    }


def _last(prompt: Any) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    ids = ids[0] if ids and isinstance(ids[0], list) else ids
    return list(ids[-16:])


def _markers(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is around the JSON of a call, None if a call has another form."""
    pattern = field.get("open_pattern", "")
    begin, end = field.get("open", pattern.removeprefix(r"\s*")), field.get("close")
    is_whole = field.get("transform") == {"type": "function", "function": "{content}"}
    is_json = field.get("content") == "json" and "content_args" not in field
    if not (is_json and is_whole and isinstance(begin, str) and isinstance(end, str)):
        return None
    return (f"{begin}\n", f"\n{end}") if not pattern or re.fullmatch(pattern, begin) else None


_TEXT = ("input_ids", "attention_mask", "token_type_ids")
"""Arguments of a generation that hold text."""


def take_schema(body: dict[str, Any]) -> str | None:
    """Take the answer's format, which transformers' server ignores, out of a request's body.

    Args:
        body: The request, which loses `response_format`, or `format` of the Responses API's `text`.

    Returns:
        The text of a JSON schema, None for any text.

    Raises:
        ValueError: A schema is missing.
    """
    text = body.get("text") or {}
    of_text = text.pop("format", None)
    if not text:
        body.pop("text", None)
    asked = body.pop("response_format", None) or of_text or {"type": "text"}
    if asked["type"] == "text":
        return None
    if asked["type"] == "json_object":
        return '{"type": "object"}'
    named = asked.get("json_schema") or asked
    if "schema" not in named:
        raise ValueError("response_format has no schema: give one, or another type")
    return json.dumps(named["schema"])


def grammar_of(request: ServedRequest, prompt: Any, tokenizer: Any, seconds: float) -> Any:
    """Return the logits processor of a request's schema or tools.

    Args:
        request: The request.
        prompt: The tokens of the prompt, [length] or [1, length].
        tokenizer: The model's tokenizer, or the processor that has it.
        seconds: The longest time to compile.

    Raises:
        ValueError: A schema cannot be compiled, or not in time, or xgrammar is not installed.
    """
    try:
        from lookahead_hf import structured
    except ImportError as error:
        raise ValueError(f"response_format and tool_choice: {error}") from error
    what, task = "the JSON schema", {"schema": request.schema}
    if request.tools is not None:
        assert request.template is not None
        what = "the parameters of a tool"
        task = calling(request.tools, request.template, tokenizer, prompt)
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

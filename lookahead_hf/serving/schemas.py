"""Requests whose answers obey a JSON schema, or call a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lookahead_hf.serving.fields import ServedRequest, current
from lookahead_hf.serving.tools import calling

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
            f"response_format={asked!r} is not understood: give "
            '{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}, '
            '{"type": "json_object"} or {"type": "text"}'
        )
    return json.dumps(schema)


def obey(request: ServedRequest, given: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """Add the logits processor of a request's schema or tools to the arguments of a generation.

    Args:
        request: The request.
        given: The arguments by name, `input_ids` among them.
        model: The model.
        tokenizer: Its tokenizer, or the processor that has it.

    Raises:
        ValueError: A schema cannot be compiled, xgrammar is not installed, the model's way to call
            tools is unknown, or it does not read what the messages hold.
    """
    has_media = any(hasattr(value, "shape") for name, value in given.items() if name not in _TEXT)
    if request.media is not None and not has_media:
        raise ValueError(f"{request.media}: this model reads text alone, so leave that part out")
    if request.schema is None and request.tools is None:
        return
    try:
        from lookahead_hf import structured
    except ImportError as error:
        raise ValueError(f"response_format and tool_choice: {error}") from error
    if request.tools is not None:
        own = calling(request.tools, model, tokenizer, given["input_ids"])
    else:
        own = structured.json_schema(request.schema, tokenizer)
    given["logits_processor"] = [*(given.get("logits_processor") or ()), own]


def obeying_manager(model: Any, tokenizer: Any) -> Callable[..., Any]:
    """Return an `init_continuous_batching` whose managers obey the schemas of their requests."""
    make = model.init_continuous_batching

    def init_continuous_batching(*args: Any, **kwargs: Any) -> Any:
        manager = make(*args, **kwargs)
        add = manager.add_request

        def add_request(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            request = current.get() or ServedRequest()
            kwargs["input_ids"] = input_ids
            try:
                obey(request, kwargs, model, tokenizer)
            except ValueError as error:
                request.refusal = str(error)
                raise
            return add(kwargs.pop("input_ids"), *args, **kwargs)

        manager.add_request = add_request
        return manager

    return init_continuous_batching

"""Requests whose answers obey a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lookahead_hf.serving.fields import ServedRequest, current


def take_schema(body: dict[str, Any]) -> str | None:
    """Take the field for the answer's format out of a request's body; transformers ignores it.

    Args:
        body: The request; `response_format`, or `format` of the Responses API's `text`, is removed.

    Returns:
        The text of a JSON schema, None if any answer is right.

    Raises:
        ValueError: The format is not known.
    """
    text = body.get("text")
    of_text = text.pop("format", None) if isinstance(text, dict) else None
    if text == {}:
        del body["text"]
    asked: Any = body.pop("response_format", None) or of_text
    kind = asked.get("type") if isinstance(asked, Mapping) else asked
    if kind in (None, "text"):
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


def obey(request: ServedRequest, arguments: dict[str, Any], tokenizer: Any) -> None:
    """Add to the arguments of a generation what makes its text obey the request's schema.

    Raises:
        ValueError: The schema cannot be compiled, or xgrammar is not installed.
    """
    if request.schema is None:
        return
    try:
        from lookahead_hf import structured
    except ImportError as error:
        raise ValueError(f"response_format: {error}") from error
    own = structured.json_schema(request.schema, tokenizer)
    arguments["logits_processor"] = [*(arguments.get("logits_processor") or ()), own]


def obeying_manager(model: Any, tokenizer: Any) -> Callable[..., Any]:
    """Return an `init_continuous_batching` of a model whose manager obeys the current request."""
    make = model.init_continuous_batching

    def init_continuous_batching(*args: Any, **kwargs: Any) -> Any:
        manager = make(*args, **kwargs)
        add = manager.add_request

        def add_request(*args: Any, **kwargs: Any) -> Any:
            request = current.get() or ServedRequest()
            try:
                obey(request, kwargs, tokenizer)
            except ValueError as error:
                request.refusal = str(error)
                raise
            return add(*args, **kwargs)

        manager.add_request = add_request
        return manager

    return init_continuous_batching

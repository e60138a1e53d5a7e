"""The fields that speculation adds to a request of the server and to its answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.serving.openai_fields import media, samples
from lookahead_hf.stats import SourceStats, SpeculativeStats

OF_THE_SERVER = {
    "pool": "start the server with --pool FILE",
    "learn": 'start the server with --config \'{"pool": FILE, "learn": true}\'',
}
"""Fields, and options of drafters, that requests cannot set: they open files or share texts."""

_EVENT = b"data: "


@dataclass(eq=False)
class ServedRequest:
    """One request: how to generate its answer, and how that went.

    The event loop and the generating thread share it; each attribute is written by one of them.

    Attributes:
        speculative: A configuration, False for plain decoding, None for the server's default.
        prediction: The text that the client expects.
        samples: Whether it asks for a sample.
        media: The type of its first part that is no text, such as a picture.
        schema: The JSON schema of the answer, None for any text.
        tools: The tools of which the answer calls one, by name, with the JSON schemas of their
            parameters; None if it need not call any.
        is_cancelled: Whether the client went away.
        has_begun: Whether the first token was generated.
        refusal: Why `generate` refused its arguments.
        stats: The statistics, None before the end and after plain decoding.
    """

    speculative: SpeculativeConfig | bool | None = None
    prediction: str | None = None
    samples: bool = False
    media: str | None = None
    schema: str | None = None
    tools: Mapping[str, Any] | None = None
    is_cancelled: bool = False
    has_begun: bool = False
    refusal: str | None = None
    stats: SpeculativeStats | None = None


current: ContextVar[ServedRequest | None] = ContextVar("lookahead_hf_request", default=None)
"""The request that is being served."""


def take_request(body: dict[str, Any], config: SpeculativeConfig) -> ServedRequest:
    """Take our fields out of a request's body, since transformers would refuse them.

    Args:
        body: The request, which loses `speculative` and `prediction`.
        config: The server's own configuration.

    Raises:
        ValueError: A field has a value that is not allowed.
    """
    asked, prediction = body.pop("speculative", None), body.pop("prediction", None)
    return ServedRequest(allowed(asked, config), _text_of(prediction), samples(body), media(body))


def allowed(asked: Any, config: SpeculativeConfig) -> SpeculativeConfig | bool | None:
    """Return how a request may speculate.

    Args:
        asked: The value that the request gives.
        config: The server's own configuration, whose pool a request may read.

    Raises:
        ValueError: The value is not allowed.
    """
    if asked is None or asked is False:
        return asked
    if asked is True:
        return config
    _check(asked if isinstance(asked, Mapping) else {})
    of_request = SpeculativeConfig.resolve(asked)
    assert of_request is not None
    if of_request.drafters is None or "pool" in of_request.drafters:
        return dataclasses.replace(of_request, pool=config.pool)
    return of_request


def _check(fields: Mapping[str, Any]) -> None:
    options = fields.get("options")
    of_drafters = options.values() if isinstance(options, Mapping) else ()
    for given in (fields, *of_drafters):
        for name, remedy in OF_THE_SERVER.items():
            if isinstance(given, Mapping) and given.get(name):
                raise ValueError(f"a request cannot set {name}, which is the server's: {remedy}")


def _text_of(prediction: Any) -> str | None:
    """Return the text of OpenAI's field `prediction`."""
    if prediction is None:
        return None
    is_content = isinstance(prediction, Mapping) and prediction.get("type") == "content"
    parts = prediction.get("content") if is_content else None
    if isinstance(parts, str):
        return parts
    if isinstance(parts, list) and all(map(_is_text, parts)):
        return "".join(part["text"] for part in parts)
    raise ValueError(
        f"prediction={prediction!r} is not understood: give "
        '{"type": "content", "content": TEXT}, where TEXT is a string or a list of parts such as '
        '{"type": "text", "text": "..."}'
    )


def _is_text(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def add_to_events(events: bytes, request: ServedRequest) -> bytes:
    """Add our fields to the server-sent events that report the usage."""
    if b'"usage"' not in events:
        return events
    return b"\n\n".join(
        _EVENT + add_to_answer(event[len(_EVENT) :], request) if event.startswith(_EVENT) else event
        for event in events.split(b"\n\n")
    )


def add_to_answer(answer: bytes, request: ServedRequest) -> bytes:
    """Add our fields to an answer in JSON that reports the usage."""
    try:
        whole = json.loads(answer)
    except ValueError:
        return answer
    # The events of the Responses API hold the answer one level deeper.
    values = whole.get("response", whole) if isinstance(whole, dict) else {}
    usage = values.get("usage") if isinstance(values, dict) else None
    if not isinstance(usage, dict):
        return answer
    stats = request.stats
    if stats is not None:
        counts = stats.to_dict("vllm")
        if stats.fallback_reason is not None:
            counts["fallback_reason"] = str(stats.fallback_reason)
        values["metrics"] = {"speculative_decoding": counts}
    if request.prediction is not None and "completion_tokens" in usage:
        details = usage.setdefault("completion_tokens_details", {})
        source = (stats or SpeculativeStats()).per_source.get("prediction", SourceStats(0, 0, 0))
        details["accepted_prediction_tokens"] = source.accepted
        details["rejected_prediction_tokens"] = source.drafted - source.accepted
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()

"""Fields of requests and answers: ours, and those of OpenAI."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.stats import SourceStats, SpeculativeStats

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_LOGPROBS = "this server returns no log probabilities: leave it out"
_EVERYWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "this server writes one answer to a request: send it several times"),
    "top_logprobs": ((0,), _LOGPROBS),
    "presence_penalty": ((0, 0.0), "use frequency_penalty, or leave it out"),
    "moderation": ((), "this server judges no texts: leave it out"),
}
REFUSED: Mapping[str, Mapping[str, tuple[tuple[Any, ...], str]]] = {
    CHAT: {
        **_EVERYWHERE,
        "logprobs": ((False,), _LOGPROBS),
        "functions": (([],), "use tools"),
        "function_call": (("auto", "none"), "use tools"),
        "audio": ((), "this server writes text alone: leave it out"),
        "modalities": ((["text"],), 'this server writes text alone: use ["text"]'),
        "web_search_options": ((), "this server searches nothing: leave it out"),
    },
    COMPLETIONS: {
        **_EVERYWHERE,
        "logprobs": ((), _LOGPROBS),
        "logit_bias": (({},), "use the chat completions"),
        "best_of": ((1,), "this server writes one answer to a request: leave it out"),
        "echo": ((False,), "put the prompt before the answer yourself"),
    },
    RESPONSES: {
        **_EVERYWHERE,
        "background": ((False,), "wait for the answer, or stream it"),
        "previous_response_id": ((), "this server keeps no answers: send the conversation"),
        "conversation": ((), "this server keeps no conversations: send it as input"),
        "context_management": (([],), "shorten the conversation yourself"),
        "prompt": ((), "this server keeps no prompts: send the text as input"),
        "image": ((), "this server writes text alone: leave it out"),
        "include": (([],), "leave it out"),
        "max_tool_calls": ((), "leave it out"),
    },
}
"""Fields by path: the values that ask for nothing, and the remedy for any other value."""

TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("temperature", "top_p", "frequency_penalty"), ((int, float), "a number")),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "seed"), ((int,), "an integer")
    ),
    **dict.fromkeys(("messages", "tools"), ((list,), "a list")),
    "input": ((str, list), "a text or a list of messages"),
    "stop": ((str, list), "a text or a list of texts"),
    "stream": ((bool,), "true or false"),
    "logit_bias": ((dict,), "an object of numbers by token id"),
    "generation_config": ((str,), "a text that holds JSON"),
}
"""Fields of any path: the types of their values, and what to give."""

MEDIA = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file")
"""Parts of a message that transformers' server leaves out for a model that reads text alone."""

_NEEDED = {CHAT: "messages", RESPONSES: "input"}


class UnknownModelError(ValueError):
    """A request names a model that the server does not have."""


def check_fields(path: str, body: dict[str, Any], only_model: str | None) -> None:
    """Refuse fields that would be ignored or not understood; obey `tool_choice` and `stream`.

    Args:
        path: The request's path.
        body: The request, which loses tools that must not be called.
        only_model: The model of a server that has a single one.

    Raises:
        UnknownModelError: The request names another model.
        ValueError: A field asks for something that the server does not do.
    """
    model = body.get("model")
    if only_model is not None and model not in (None, only_model):
        raise UnknownModelError(f"there is no model {model!r} here: this server has {only_model!r}")
    for name, (neutral, fix) in REFUSED[path].items():
        value = body.get(name)
        is_neutral = any(type(value) is type(each) and value == each for each in (None, *neutral))
        if not is_neutral:
            raise ValueError(f"{name}={value!r} is not served: {fix}")
    _check_types(path, body)
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    if path == RESPONSES and body.get("stream") is None:
        body["stream"] = False  # transformers' server would stream


def _check_types(path: str, body: Mapping[str, Any]) -> None:
    for name, (types, wanted) in TYPES.items():
        value = body.get(name)
        if value is not None and type(value) not in types:
            raise ValueError(f"{name}={value!r} is not understood: give {wanted}")
    for tool in body.get("tools") or ():
        if not isinstance(tool, Mapping):
            raise ValueError(f"{tool!r} is no tool: give an object with type and function")
    seed = body.get("seed")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed} is not served: give one of 64 bits")
    needed = _NEEDED.get(path)
    if needed is not None and not body.get(needed):
        raise ValueError(f"the request has no {needed}: give {TYPES[needed][1]}")
    for message in body.get("messages") or ():
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            raise ValueError(f"{message!r} is no message: give an object with role and content")


def samples(body: Mapping[str, Any]) -> bool:
    """Return whether a request asks for a sample.

    transformers' server sets the temperature, and a model that is greedy by default ignores it.
    """
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if body.get("generation_config") is not None or temperature == 0:
        return False
    return temperature is not None or (top_p is not None and top_p < 1)


def media(body: Mapping[str, Any]) -> str | None:
    """Return the type of the first part of the messages that is no text, None if all are."""
    messages = body.get("messages") or body.get("input")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [message]:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in MEDIA:
                return str(kind)
    return None


def listing(manager: Any) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that lists a server's only model, else those of the hub's cache.

    Args:
        manager: transformers' manager of the server's models.
    """
    of_cache = manager.get_gen_models

    def models() -> list[dict[str, Any]]:
        names = [manager.force_model]
        if names == [None]:
            from huggingface_hub.errors import CacheNotFound

            try:
                return list(of_cache())
            except CacheNotFound:  # no model of the hub was ever loaded here
                names = [name.partition("@")[0] for name in manager.loaded_models]
        return [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in names]

    return models


def error(message: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form, whose message clients show."""
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def as_error(answer: bytes) -> bytes:
    """Turn an error of FastAPI, `{"detail": ...}`, into OpenAI's form; keep any other."""
    try:
        detail = json.loads(answer).get("detail")
    except (ValueError, AttributeError):
        return answer
    return json.dumps(error(detail)).encode() if isinstance(detail, str) else answer


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

"""Fields of OpenAI's API that transformers' server ignores or trips over: obeyed, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

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

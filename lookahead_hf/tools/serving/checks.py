"""Checks the fields of a request before any work: what is wrong is refused in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lookahead_hf.tools.serving.limits import USUAL, Limits

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_EVERYWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "moderation": ((), "this server judges no texts: leave it out"),
}
REFUSED: Mapping[str, Mapping[str, tuple[tuple[Any, ...], str]]] = {
    CHAT: {
        **_EVERYWHERE,
        "functions": (([],), "use tools"),
        "function_call": (("auto", "none"), "use tools"),
        "audio": ((), "this server writes text alone: leave it out"),
        "modalities": ((["text"],), 'this server writes text alone: use ["text"]'),
        "web_search_options": ((), "this server searches nothing: leave it out"),
    },
    COMPLETIONS: {
        **_EVERYWHERE,
        "top_logprobs": ((0,), "give their number as logprobs"),
        "logit_bias": (({},), "use the chat completions"),
        "best_of": ((1,), "this server does not compare answers: use n"),
        "echo": ((False,), "put the prompt before the answer yourself"),
    },
    RESPONSES: {
        **_EVERYWHERE,
        "top_logprobs": ((0,), "use the chat completions"),
        "n": ((1,), "this server writes one answer to such a request: send it several times"),
        "stop": ((), "use the chat completions"),
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
    **dict.fromkeys(("messages", "tools"), ((list,), "a list")),
    **dict.fromkeys(("suffix", "instructions", "user"), ((str,), "a text")),
    **dict.fromkeys(("stream_options", "chat_template_kwargs"), ((dict,), "an object")),
    "prompt": ((str, list), "a text or a list of texts"),
    "input": ((str, list), "a text or a list of messages"),
    "stop": ((str, list), "a text or a list of texts"),
    "stream": ((bool,), "true or false"),
    "logit_bias": ((dict,), "an object of numbers by token id"),
    "generation_config": ((str,), "a text that holds JSON"),
}
"""Fields of any path: the types of their values, and what to give."""

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MANY = 2**31 - 1

NUMBERS: Mapping[str, tuple[type, float, float]] = {
    **dict.fromkeys(_LENGTHS, (int, 1, _MANY)),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "frequency_penalty": (float, -0.99, 2),
    "presence_penalty": (float, -2, 2),
    "seed": (int, -(2**63), 2**64 - 1),
    "n": (int, 1, _MANY),
}
"""Numbers of any path: an integer or any number, the least and the largest."""

SETTINGS: Mapping[str, tuple[type, float, float] | None] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), (int, 1, _MANY)),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size"), (int, 0, _MANY)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (float, 0.01, 100)),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p"), (float, 0, 1)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (float, 0, 1)),
    **dict.fromkeys(("length_penalty", "guidance_scale"), (float, -100, 100)),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "exponential_decay_length_penalty")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")),
    **dict.fromkeys(("begin_suppress_tokens", "eos_token_id", "pad_token_id", "bos_token_id")),
    **dict.fromkeys(("do_sample", "early_stopping", "renormalize_logits", "speculative")),
    "remove_invalid_values": None,
    "temperature": (float, 0, 100),
    "top_k": (int, 0, _MANY),
    "max_time": (float, 0, 1e9),
    "num_beams": (int, 1, 8),
}
"""Fields of `generation_config`, with the range of numbers; `generate` checks the others."""

_IDS = (
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "eos_token_id"),
    *("pad_token_id", "bos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
)

MEDIA = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file")
"""Parts of a message that transformers' server leaves out for a model that reads text alone."""

_TEXTS = ("text", "input_text", "output_text")
_NEEDED = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}


class UnknownModelError(ValueError):
    """A request names a model that the server does not have."""


def shown(value: Any) -> str:
    """Return a value for a sentence, of at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def parsed(body: bytes) -> dict[str, Any]:
    """Return the fields of a request.

    Raises:
        ValueError: The body is not an object of JSON, in which numbers are finite and texts are
            Unicode.
    """

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no number of JSON")

    def finite(digits: str) -> float:
        return float(digits) if math.isfinite(float(digits)) else refuse(digits[:20])

    try:
        fields = json.loads(body, parse_constant=refuse, parse_float=finite)
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeError as error:
        why = "half of a surrogate pair" if isinstance(error, UnicodeEncodeError) else "no UTF-8"
        raise ValueError(f"the request holds {why}: send Unicode") from error
    except RecursionError as error:
        raise ValueError("the request is too deep: send fewer nested values") from error
    except ValueError as error:
        raise ValueError(f"the request is not JSON: {shown(str(error))[1:-1]}") from error
    if not isinstance(fields, dict):
        raise ValueError("the request is no object of JSON: send fields by their names")
    return fields


def check_fields(
    path: str, body: dict[str, Any], only_model: str | None, limits: Limits = USUAL
) -> None:
    """Refuse fields that would be ignored or not understood; correct others.

    Args:
        path: The request's path.
        body: The request, which loses tools that must not be called.
        only_model: The model of a server that has a single one.
        limits: What a request may ask for.

    Raises:
        UnknownModelError: The request names another model.
        ValueError: A field asks for something that the server does not do.
    """
    check_model(body.get("model"), only_model)
    for name, (neutral, fix) in REFUSED[path].items():
        value = body.get(name)
        is_neutral = any(type(value) is type(each) and value == each for each in (None, *neutral))
        if not is_neutral:
            raise ValueError(f"{name}={shown(value)} is not served: {fix}")
    for name, (types, wanted) in TYPES.items():
        if body.get(name) is not None and type(body[name]) not in types:
            raise ValueError(f"{name}={shown(body[name])} is not understood: give {wanted}")
    for name, bounds in NUMBERS.items():
        _check_number(name, body.get(name), *bounds)
    needed = _NEEDED[path]
    if not body.get(needed):
        raise ValueError(f"the request has no {needed}: give {TYPES[needed][1]}")
    _check_stop(body.get("stop"), limits)
    if path == CHAT:
        if not isinstance(body.get("logprobs"), (bool, type(None))):
            raise ValueError(f"logprobs={shown(body['logprobs'])} is not understood: give true")
        _check_number("top_logprobs", body.get("top_logprobs"), int, 0, 20)
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise ValueError("top_logprobs is served beside logprobs=true: give that, too")
    elif path == COMPLETIONS:
        _check_number("logprobs", body.get("logprobs"), int, 0, 5)
    if body.get("logit_bias") is not None:
        body["logit_bias"] = _checked_bias(body["logit_bias"])
    _check_settings(body.get("generation_config"))
    for name, value in (body.get("chat_template_kwargs") or {}).items():
        if name in _OF_TEMPLATES or not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"chat_template_kwargs cannot set {shown(name)}: leave it out")
    for tool in body.get("tools") or ():
        _check_tool(tool)
    prompts = body.get("prompt") if path == COMPLETIONS else None
    if isinstance(prompts, list) and not all(isinstance(each, str) and each for each in prompts):
        raise ValueError("prompt is not understood: give a text or a list of texts")
    for name, count, most in (
        ("n", body.get("n") or 1, limits.choices),
        ("prompt", len(prompts) if isinstance(prompts, list) else 1, limits.prompts),
    ):
        if count > most:
            raise ValueError(f"{name} asks for {count} texts: ask for {most} at most")
    for key in ("messages", "input"):
        for message in body[key] if isinstance(body.get(key), list) else ():
            _check_message(message, is_input=key == "input")
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    if path == RESPONSES and body.get("stream") is None:
        body["stream"] = False  # transformers' server would stream


def check_model(model: Any, only_model: str | None) -> None:
    """Raise an error if a request names a model that is not served, or none that could be."""
    if model is not None and not isinstance(model, str):
        raise ValueError(f"model={shown(model)} is not understood: give a text")
    if only_model is not None and model not in (None, only_model):
        raise UnknownModelError(
            f"there is no model {shown(model)} here: this server has {only_model!r}"
        )
    if only_model is None and not model:
        raise ValueError("the request has no model: give the name of one")


def _check_number(name: str, value: Any, kind: type, least: float, most: float) -> None:
    if value is None:
        return
    if type(value) not in (int, kind):
        wanted = "an integer" if kind is int else "a number"
        raise ValueError(f"{name}={shown(value)} is not understood: give {wanted}")
    if not least <= value <= most:
        at_most = "" if most == _MANY else f" to {most:g}"
        wanted = "one of 64 bits" if name == "seed" else f"{least:g}{at_most or ' or more'}"
        raise ValueError(f"{name}={shown(value)} is not served: give {wanted}")


def _check_stop(stop: Any, limits: Limits) -> None:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > limits.stop_strings:
        raise ValueError(f"stop has {len(strings)} texts: give {limits.stop_strings} at most")
    for each in strings:
        if not (isinstance(each, str) and 0 < len(each) <= limits.stop_characters):
            most = limits.stop_characters
            raise ValueError(f"stop={shown(each)} is not served: give texts of 1 to {most} letters")


def _checked_bias(bias: Mapping[str, Any]) -> dict[str, float]:
    """Return a bias with the numbers that transformers takes."""
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"logit_bias has the key {shown(token)}: give token ids")
        if value is None:
            raise ValueError("logit_bias holds null: give numbers")
        _check_number(f"logit_bias of {token}", value, float, -100, 100)
    return {token: float(value) for token, value in bias.items()}


def _check_settings(text: str | None) -> None:
    if text is None:
        return
    try:
        settings = parsed(text.encode())
    except ValueError as error:
        raise ValueError(f"generation_config is not understood: {error}") from error
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ValueError(
                f"generation_config cannot set {shown(name)}: leave it out; known are "
                f"{', '.join(SETTINGS)}"
            )
        bounds = SETTINGS[name]
        if bounds is not None:
            _check_number(f"generation_config: {name}", value, *bounds)
        elif name in _IDS and not _are_ids(value, nested=name == "bad_words_ids"):
            raise ValueError(f"generation_config: {name}={shown(value)} is not token ids")


def _are_ids(value: Any, nested: bool) -> bool:
    """Return whether a value is a token id, a list of them, or, if nested, a list of such lists."""
    if nested:
        lists = value if isinstance(value, list) else [None]
        return all(isinstance(each, list) and each and _are_ids(each, False) for each in lists)
    each = value if isinstance(value, list) else [value]
    return value is None or all(type(token) is int and token >= 0 for token in each)


def _check_tool(tool: Any) -> None:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{shown(tool)} is no tool: give an object with type and function")
    if not isinstance(function.get("name"), (str, type(None))):
        raise ValueError(f"a tool has the name {shown(function['name'])}: give a text")
    if not isinstance(function.get("parameters"), (Mapping, type(None))):
        raise ValueError("a tool has parameters that are no JSON schema: give an object")


def _check_message(message: Any, is_input: bool) -> None:
    """Check a message, or an item of `input`, which may be a part or a call as well."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{shown(message)} is no message: give an object with role and content")
    if is_input and "role" not in message:
        _check_item(message)
        return
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{shown(message)} is no message: give an object with role and content")
    content = message.get("content")
    if not isinstance(content, (str, list, type(None))):
        raise ValueError(f"content={shown(content)} is not understood: give a text or parts")
    for part in content if isinstance(content, list) else ():
        _check_part(part)
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, type(None))):
        raise ValueError(f"tool_calls={shown(calls)} is not understood: give a list")
    for call in calls or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        _check_call(function if isinstance(function, Mapping) else {})


def _check_item(item: Mapping[str, Any]) -> None:
    kind = item.get("type")
    if kind == "reasoning":
        parts = item.get("content") or []
        if not (isinstance(parts, list) and all(map(_has_text, parts))):
            raise ValueError("a reasoning is not understood: give its content as parts with text")
    elif kind in ("function_call", "function_call_output"):
        if not isinstance(item.get("call_id"), str):
            raise ValueError(f"a {kind} has no call_id: give a text")
        if kind == "function_call":
            _check_call(item)
        elif not isinstance(item.get("output"), str):
            raise ValueError(f"a {kind} has no output: give a text")
    else:
        _check_part(item)


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _check_call(function: Mapping[str, Any]) -> None:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not (isinstance(function.get("name"), str) and isinstance(arguments, Mapping)):
        raise ValueError("a call of a tool is not understood: give its name, and arguments as JSON")


def _check_part(part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS and _has_text(part):
        return
    if kind not in MEDIA:
        raise ValueError(
            f"{shown(part)} is no part of a message: give an object with a type, such as "
            '{"type": "text", "text": "..."}'
        )
    source = part.get("image_url" if kind == "input_image" else kind)
    if kind == "input_audio":
        data = source.get("data") if isinstance(source, Mapping) else source
        is_sent = isinstance(data, str) and data[:1] != "/" and not data.startswith("http")
    else:
        source = source.get("url") if isinstance(source, Mapping) else source
        is_sent = isinstance(source, str) and source.startswith("data:")
    if kind not in ("file", "input_file") and not is_sent:
        raise ValueError(f"{kind} names no content: send it in the message, as data:...;base64,...")


_OF_TEMPLATES = frozenset(
    ("conversation", "messages", "chat_template", "tools", "documents", "tokenize", "padding")
    + ("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask")
    + ("add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "processor_kwargs")
    + ("load_audio_from_video", "num_frames", "video_fps", "fps", "sampling_rate", "kwargs")
)
"""Arguments of `apply_chat_template` that are the server's."""


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


def length(body: Mapping[str, Any]) -> str | None:
    """Return the name of the field by which a request sets the length of its answer."""
    if body.get("generation_config") is not None:
        return "generation_config"
    return next((name for name in _LENGTHS if body.get(name) is not None), None)

"""Reads the fields of a request before any work: what is wrong is refused in one sentence."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Json, Tag, ValidationError, create_model

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.queue.request import Group, request_seed
from lookahead_hf.tools.serving.fields import (
    ANY,
    USUAL,
    Limits,
    Reach,
    Refused,
    ServedRequest,
    allowed,
    shown,
)
from lookahead_hf.tools.serving.schemas import take_schema, take_tools

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_MODERATION: Any = (), "this server judges no texts: leave it out"
REFUSED: Mapping[str, Mapping[str, tuple[tuple[Any, ...], str]]] = {
    CHAT: {
        "moderation": _MODERATION,
        "functions": (([],), "use tools"),
        "function_call": (("auto", "none"), "use tools"),
        "audio": ((), "this server writes text alone: leave it out"),
        "modalities": ((["text"],), 'this server writes text alone: use ["text"]'),
        "web_search_options": ((), "this server searches nothing: leave it out"),
    },
    COMPLETIONS: {
        "moderation": _MODERATION,
        "top_logprobs": ((0,), "give their number as logprobs"),
        "logit_bias": (({},), "use the chat completions"),
        "best_of": ((1,), "this server does not compare answers: use n"),
        "echo": ((False,), "put the prompt before the answer yourself"),
        "suffix": (("",), "write what is around the gap into the prompt, as the model expects it"),
    },
    RESPONSES: {
        "moderation": _MODERATION,
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

MOST_VALUES = 100_000  # Values of a request, unless its text may have more commas


def parsed(body: bytes, most: int = MOST_VALUES) -> dict[str, Any]:
    """Return a request's fields; ValueError if it is no object of finite, Unicode JSON."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no number of JSON")

    def finite(digits: str) -> float:
        return float(digits) if math.isfinite(float(digits)) else refuse(digits[:20])

    if sum(map(body.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"a request has {most} commas and brackets at most: send less")
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


def _object(
    optional: Mapping[str, Any], *, extra: Literal["allow", "forbid"] = "allow", **needed: Any
) -> Any:
    """Return the schema of an object, from the types of its fields."""
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in optional.items()}
    fields |= {name: (kind, ...) for name, kind in needed.items()}
    return create_model("Object", __config__={"strict": True, "extra": extra}, **fields)


def _check(schema: Any, fields: dict[str, Any], reach: Reach) -> None:
    """Raise ValueError, with a sentence about the first wrong field, if fields break a schema."""
    try:
        schema.model_validate(fields, context=reach)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        name = str(wrong[0]["loc"][0])
        own = [each for each in wrong if each["loc"][0] == name]
        depth = max(len(each["loc"]) for each in own)  # where most types of a union fit
        deepest = [each for each in own if len(each["loc"]) == depth]
        said = (
            f"{each['loc'][-1]} is missing" if each["type"] == "missing" else each["msg"]
            for each in deepest
        )
        why = "; ".join(dict.fromkeys(said)).replace(" or instance of Object", "")
        why = why.replace("Value error, ", "")[:300]
        if fields.get(name) is None and wrong[0]["type"] != "extra_forbidden":
            raise ValueError(f"the request has no {name}: give it") from error
        value = shown(deepest[0]["input"])
        raise ValueError(f"{name[:100]}={value} is not served: {why}") from error


def _any(*kinds: Any, told_by: Any = None) -> Any:
    """Return the type of what has one of several types, perhaps as `told_by` tells."""
    return reduce(or_, kinds) if told_by is None else Annotated[reduce(or_, kinds), told_by]


def _list(kind: Any, least: int = 0, most: int = 1024) -> Any:
    return Annotated[GenericAlias(list, kind), Field(min_length=least, max_length=most)]


def _number(kind: type, least: float, most: float = 2**31 - 1) -> Any:
    return Annotated[kind, Field(ge=least, le=most)]


def _pair(*kinds: Any) -> Any:
    return Annotated[GenericAlias(tuple, kinds), Field(strict=False)]


def _temperature(most: float) -> Any:
    """Return the type of temperatures; below a millionth, scores would not be finite."""
    return _any(_number(float, 0, 0), _number(float, 1e-6, most))


def _settings(text: str, info: Any) -> str:
    _check(SETTINGS, parsed(text.encode()), info.context)
    return text


def _known(token: int | str, info: Any) -> int | str:
    size = info.context.vocab_size
    if size is not None and int(token) >= size:
        raise ValueError(f"the model has {size} tokens, from 0 on")
    return token


def _of_clients(name: str) -> str:
    if name in _OF_TEMPLATES:
        raise ValueError(f"{name} is the server's own")
    return name


_OF_TEMPLATES = frozenset(
    ("conversation", "messages", "chat_template", "tools", "documents", "tokenize", "padding")
    + ("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask")
    + ("add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "processor_kwargs")
    + ("load_audio_from_video", "num_frames", "video_fps", "fps", "sampling_rate", "kwargs")
    + ("images", "videos", "audio", "images_kwargs", "videos_kwargs", "audio_kwargs", "text")
    + ("self", "conversations", "text_kwargs", "common_kwargs", "split_special_tokens")
)
"""Arguments of `apply_chat_template`, or of the processor that it calls, which are the server's."""

_NAME = Annotated[str, Field(min_length=1)]
_TOKEN: Any = Annotated[_number(int, 0), AfterValidator(_known)]
_TOKENS, _TEXTS = _any(_TOKEN, _list(_TOKEN, 1)), _any(_NAME, _list(_NAME, 1, 32))

SETTINGS = _object(
    {
        **dict.fromkeys(("max_new_tokens", "max_length"), _number(int, 1)),
        **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size"), _number(int, 0)),
        **dict.fromkeys(("repetition_penalty",), _number(float, 0.01, 100)),
        **dict.fromkeys(("encoder_repetition_penalty",), _number(float, 0.01, 100)),
        **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p"), _number(float, 0, 1)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), _number(float, 0, 1)),
        **dict.fromkeys(("length_penalty", "guidance_scale"), _number(float, -10, 10)),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _list(_TOKEN)),
        **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), _TOKENS),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "forced_bos_token_id"), _TOKEN),
        **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), bool),
        "early_stopping": _any(bool, Literal["never"]),
        "exponential_decay_length_penalty": _pair(_number(int, 0), _number(float, 0.01, 10)),
        "sequence_bias": _list(_pair(_list(_TOKEN, 1, 64), _number(float, -100, 100)), 1, 256),
        "bad_words_ids": _list(_list(_TOKEN, 1, 64), 1, 256),
        "temperature": _temperature(100),
        "top_k": _number(int, 0),
        "max_time": _number(float, 0, 1e9),
        "num_beams": _number(int, 1, 8),
    },
    extra="forbid",
)
"""Fields of `generation_config`."""
_FLOATS = "temperature", "repetition_penalty"  # What transformers takes as no whole number

_SENT = Annotated[str, Field(pattern="^data:")]
"""The content of a picture or film: the server opens no other address and no file."""

_URL = _any(_SENT, _object({}, url=_SENT))
_FORMAT_NAME = Annotated[str, Field(pattern="^[a-z0-9]+$")]
"""The format of a sound; transformers' server might read one without as the path of a file."""

_MEDIA: Mapping[str, Mapping[str, Any]] = {
    **{f"{kind}_url": {f"{kind}_url": _URL} for kind in ("image", "audio", "video")},
    "input_image": {"image_url": _URL},
    "input_audio": {"input_audio": _any(_SENT, _object({}, data=str, format=_FORMAT_NAME))},
    **{name: {} for name in ("file", "input_file")},
}
"""Parts of a message that transformers' server leaves out for a model that reads text alone."""

_OF_PARTS = {**_MEDIA, **dict.fromkeys(("text", "input_text", "output_text"), {"text": str})}
_PARTS = {name: _object({}, type=Literal[name], **own) for name, own in _OF_PARTS.items()}
_TEXT = _PARTS["text"]
_PART = _any(*_PARTS.values(), told_by=Discriminator("type"))
_CALL = _object({}, name=str, arguments=Json[dict[str, Any]] | dict[str, Any])
_MESSAGE = _object(
    {"content": _any(str, _list(_PART)), "tool_calls": _list(_object({}, function=_CALL))}, role=str
)
_ITEMS = {
    **_PARTS,
    "message": _MESSAGE,
    "reasoning": _object({"content": _list(_object({}, text=str))}),
    "function_call": _object({}, call_id=str, name=str, arguments=Json[dict[str, Any]]),
    "function_call_output": _object({}, call_id=str, output=str),
}


def _kind_of(item: Any) -> str | None:
    """Return which of `_ITEMS` an item of `input` is."""
    if not isinstance(item, Mapping):
        return None
    kind = "message" if "role" in item else item.get("type")
    return kind if isinstance(kind, str) else None


_ITEM = _any(
    *(Annotated[kind, Tag(name)] for name, kind in _ITEMS.items()),
    told_by=Discriminator(
        _kind_of,
        custom_error_type="item",
        custom_error_message="give an object with a role, or with a known type",
    ),
)
_TOOL_NAME = Annotated[str, Field(pattern=r'^[^"\\\x00-\x1f]+$')]  # as it stands in JSON
_FUNCTION = {"name": _TOOL_NAME, "parameters": dict[str, Any], "type": Literal["function"]}
_ANY_SCHEMA = Annotated[dict[str, Any] | bool, Field(alias="schema")]
_FORMAT = _any(
    *(_object({}, type=Literal[name]) for name in ("text", "json_object")),
    _object({"json_schema": _object({}, schema_=_ANY_SCHEMA)}, type=Literal["json_schema"]),
    told_by=Discriminator("type"),
)
_DIGITS = Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(_known)]
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_FIELDS = {
    **dict.fromkeys(_LENGTHS, _number(int, 1)),
    **dict.fromkeys(("instructions", "user", "model"), str),
    "temperature": _temperature(2),
    "top_p": _number(float, 0, 1),
    "frequency_penalty": _number(float, -0.99, 2),
    "presence_penalty": _number(float, -2, 2),
    "seed": _number(int, -(2**63), 2**64 - 1),
    "n": _number(int, 1, 8),
    "stop": _any(_NAME, _list(_NAME)),
    **dict.fromkeys(("stream", "parallel_tool_calls"), bool),
    "stream_options": dict[str, Any],
    "logit_bias": Annotated[
        GenericAlias(dict, (_DIGITS, _number(float, -100, 100))), Field(max_length=1024)
    ],
    "generation_config": Annotated[str, AfterValidator(_settings)],
    "chat_template_kwargs": dict[
        Annotated[str, AfterValidator(_of_clients)], bool | int | float | str
    ],
    "tools": _list(_object({"function": _object(_FUNCTION), **_FUNCTION})),
    "prediction": _object({}, type=Literal["content"], content=_any(str, _list(_TEXT))),
    "response_format": _FORMAT,
    "text": _object({"format": _FORMAT}),
}
SCHEMAS: Mapping[str, Any] = {
    CHAT: _object(
        {**_FIELDS, "logprobs": bool, "top_logprobs": _number(int, 0, 20)},
        messages=_list(_MESSAGE, 1, 4096),
    ),
    COMPLETIONS: _object({**_FIELDS, "logprobs": _number(int, 0, 5)}, prompt=_TEXTS),
    RESPONSES: _object(_FIELDS, input=_any(_NAME, _list(_ITEM, 1, 4096))),
}

_DECISIONS = _object({"assets": GenericAlias(dict, (str, _object({}, data_base64=_SENT)))})


def check_fields(path: str, body: dict[str, Any], only_model: str, reach: Reach = ANY) -> None:
    """Refuse fields that would be ignored or not understood; correct others.

    The body loses tools that must not be called. Refused if it names another model than the
    server's, ValueError if a field asks for something that the server does not do.
    """
    for name, (neutral, fix) in REFUSED[path].items():
        value = body.get(name)
        is_neutral = any(type(value) is type(each) and value == each for each in (None, *neutral))
        if not is_neutral:
            raise ValueError(f"{name}={shown(value)} is not served: {fix}")
    _check(SCHEMAS[path], body, reach)
    check_model(body.get("model"), only_model)
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [body.get("prompt")]
    names = "messages", "input", "instructions", "tools", "chat_template_kwargs"
    for each in ([*map(body.get, names)], body.get("prediction"), *prompts):
        reach.check(_joined(each))
    if path == CHAT and body.get("top_logprobs") and not body.get("logprobs"):
        raise ValueError("top_logprobs is served beside logprobs=true: give that, too")
    for token, value in (body.get("logit_bias") or {}).items():
        body["logit_bias"][token] = float(value)  # as transformers takes it
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    if body.get("tools") and body.get("tool_choice") in (None, "auto") and not reach.shows_tools:
        raise ValueError("the chat template shows no tools: leave them out, or require a call")
    for name in [name for name, value in body.items() if value is None]:
        del body[name]  # transformers' server would take it for a value
    body.setdefault("stream", False)  # it would stream responses


def check_decisions(body: bytes, only_model: str, reach: Reach) -> None:
    """Refuse a request that names another model, or asks for decisions with files or long texts."""
    fields = parsed(body)
    check_model(fields.get("model"), only_model)
    _check(_DECISIONS, fields, reach)
    reach.check(_joined([fields.get("state"), fields.get("questions")]))


def _joined(value: Any) -> str:
    """Return all texts of a value, without what is no text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, dict)) or _is_media(value):
        return ""
    return "\n".join(map(_joined, value if isinstance(value, list) else [*value, *value.values()]))


def check_model(model: Any, only_model: str) -> None:
    """Raise Refused if a request names another model than the server's."""
    if model not in (None, only_model):
        why = f"there is no model {shown(model)} here: this server has {only_model!r}"
        raise Refused(why, 404, "model_not_found")


def media(body: Mapping[str, Any]) -> str | None:
    """Return the type of the first part of the messages that is no text, None if all are."""
    messages = body.get("messages") or body.get("input")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [message]:
            # In fields that the path does not read there may be anything.
            if _is_media(part):
                return str(part["type"])
    return None


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in [*_MEDIA]


def take_requests(
    path: str,
    body: bytes,
    config: SpeculativeConfig,
    only_model: str,
    limits: Limits,
    pools: Mapping[str, Any],
    reach: Reach,
) -> tuple[list[ServedRequest], int]:
    """Return requests for one text each, and the number of prompts; or refuse them."""
    fields = parsed(body, max(MOST_VALUES, reach.tokens or 0))
    check_fields(path, fields, only_model, reach)
    each = int(fields.pop("n", None) or 1)
    given = fields.get("prompt") if path == COMPLETIONS else None
    prompts = given if isinstance(given, list) else [given]
    first, taken = take_request(fields, config, limits, pools), []
    first.group = Group()
    for index in range(each * len(prompts)):
        own = {} if given is None else {"prompt": prompts[index // each]}
        fresh: dict[str, Any] = {"over": asyncio.Event(), "places": []}
        taken.append(replace(first, body={**fields, **own}, **fresh))
        if first.seed is not None and index:
            taken[-1].seed = request_seed(first.seed, index)
    return taken, len(prompts)


def take_request(
    body: dict[str, Any],
    config: SpeculativeConfig,
    limits: Limits = USUAL,
    pools: Mapping[str, Any] = MappingProxyType({}),
) -> ServedRequest:
    """Take what transformers would do otherwise out of a body; ValueError for a wrong value."""
    asked, prediction = body.pop("speculative", None), body.pop("prediction", None)
    stop, penalty = body.pop("stop", None) or (), body.pop("presence_penalty", None)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    most, longest = limits.stop_strings, limits.stop_characters
    if len(stop) > most or any(len(each) > longest for each in stop):
        raise ValueError(f"stop takes {most} texts of {longest} characters at most")
    schema, tools = take_schema(body), take_tools(body)
    if len((schema if tools is None else json.dumps(tools)) or "") > limits.schema_kb * 1000:
        raise ValueError(f"a schema has {limits.schema_kb:g} KB at most: shorten it")
    given, temperature, top_p = map(body.get, ("generation_config", "temperature", "top_p"))
    # transformers' server sets the temperature, and a model that is greedy by default ignores it.
    samples = temperature is not None or (top_p is not None and top_p < 1)
    lengths = (name for name in _LENGTHS if body.get(name) is not None)
    settings = json.loads(given or "{}")
    settings |= {key: float(of) for key, of in settings.items() if of and key.endswith(_FLOATS)}
    if given is not None:
        body["generation_config"] = json.dumps(settings)
    has_length = any(settings.get(key) for key in ("max_new_tokens", "max_length"))
    is_alone = any(settings.get(key, 1) not in (None, 1) for key in ("num_beams", "guidance_scale"))
    log_probs, num_top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if isinstance(log_probs, bool):
        log_probs = num_top or 0 if log_probs else None
    if prediction is not None:
        said = prediction["content"]
        prediction = said if isinstance(said, str) else "".join(part["text"] for part in said)
    kind = media(body)
    return ServedRequest(
        speculative=allowed(asked, config, pools),
        prediction=prediction,
        samples=settings.get("do_sample") is None and temperature != 0 and samples,
        media=kind,
        length="generation_config" if has_length else next(lengths, None),
        seed=body.pop("seed", None),
        stop=stop,
        presence_penalty=float(penalty or 0),
        log_probs=log_probs,
        schema=schema,
        tools=tools,
        streams=bool(body.get("stream")),
        is_alone=is_alone or prediction is not None or kind is not None,
    )

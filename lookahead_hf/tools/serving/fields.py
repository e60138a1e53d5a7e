"""What a server grants a request, and what it knows of each."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.stats import SpeculativeStats


def _limit(default: Any, what: str) -> Any:
    return field(default=default, metadata={"what": what})


@dataclass(frozen=True)
class Limits:
    """The limits of a server; each is an option `--max-NAME` of `lookahead-hf serve`."""

    body_mb: float = _limit(10.0, "MB of a request")
    stop_strings: int = _limit(16, "strings of `stop`")
    stop_characters: int = _limit(256, "characters of a string of `stop`")
    schema_kb: float = _limit(64.0, "KB of a JSON schema, or of the tools to be called")
    compile_seconds: float = _limit(5.0, "seconds to compile a schema")
    waiting: int = _limit(256, "requests that wait for their first token")
    seconds: float = _limit(600.0, "seconds from a request's arrival to the end of its answer")
    tokens: int | None = _limit(
        None, "tokens of a prompt and its answer; by default the model's positions"
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not math.isfinite(value):
                raise ValueError(f"the limit {name} is {value}: give a number")


USUAL = Limits()  # The limits of a server that is told no others


@dataclass(frozen=True)
class Reach:
    """What the served model can read; None where that is not known."""

    vocab_size: int | None = None
    tokens: int | None = None  # of a prompt and its answer
    longest: int = 1  # the most characters of a token
    tokenizer: Any = None
    shows_tools: bool = True  # whether its chat template tells the model of tools

    def check(self, text: str) -> None:
        """Raise ValueError if the length of a text, or its beginning, shows that it cannot fit."""
        most, size = self.tokens, len(text)
        if most is None or size <= min(8, self.longest) * most:
            return
        if size > most * self.longest or len(self.tokenizer(text[: 8 * most]).input_ids) > most + 1:
            raise ValueError(
                f"a text of {size} characters needs more than the {most} tokens that one may have "
                "here: shorten it"
            )


ANY = Reach()  # Of a model that is not known


class Refused(Exception):
    """A request is not served: why, with which status and code."""

    def __init__(self, why: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(why)
        self.given = why, status, code


def shown(value: Any) -> str:
    """Return a value for a sentence, of at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def error(message: str, code: str | None = None, status: int = 400) -> dict[str, Any]:
    """Return an error in OpenAI's form, whose message clients show."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def as_error(answer: bytes) -> bytes:
    """Turn an error of FastAPI or transformers into OpenAI's form; keep any other."""
    try:
        whole = json.loads(answer)
        detail = whole.get("detail", whole.get("error"))
    except (ValueError, AttributeError):
        return answer
    if isinstance(detail, list):  # of pydantic: places and sentences
        detail = "; ".join(
            f"{each.get('loc')}: {each.get('msg')}" for each in detail[:3] if isinstance(each, dict)
        )
    if not isinstance(detail, str):
        return answer
    return json.dumps(error(detail if len(detail) <= 300 else f"{detail[:297]}...")).encode()


OF_THE_SERVER = {
    "pool": "name one of those that it was started with as --pool NAME=FILE",
    "learn": 'start the server with --config \'{"pool": FILE, "learn": true}\'',
    "path": 'start the server with --config \'{"options": {"medusa": {"path": FILE}}, ...}\'',
}
"""Fields, and options of drafters, that requests cannot set: they open files or share texts."""


@dataclass(eq=False)
class ServedRequest:
    """One request: how to generate its answer, and how that went.

    The event loop and the generating thread share it; each attribute is written by one of them.
    """

    body: dict[str, Any] | None = None  # what transformers' server gets; its values are shared
    # A configuration, False for plain decoding, None for the server's default
    speculative: SpeculativeConfig | bool | None = None
    prediction: str | None = None  # the text that the client expects
    samples: bool = False  # whether it asks for a sample
    media: str | None = None  # the type of its first part that is no text, such as a picture
    length: str | None = None  # the field that sets its answer's length, None if the server does
    seed: int | None = None  # its seed, None for random numbers of the server's
    stop: tuple[str, ...] = ()  # the texts that end its answer
    presence_penalty: float = 0.0  # what a token that the answer has loses
    # How many of the likeliest tokens have log probabilities, too; None if no token has
    log_probs: int | None = None
    schema: str | None = None  # the JSON schema of the answer, None for any text
    # The JSON schemas of the tools of which the answer calls one, by name; None if of none
    tools: Mapping[str, Any] | None = None
    template: Mapping[str, Any] | None = None  # how the server finds a tool's call in the answer
    is_alone: bool = False  # whether a field but `speculative` cannot be served beside others
    is_cancelled: bool = False  # whether nobody waits for it any more
    has_begun: bool = False  # whether the first token was generated
    generates: bool = False  # whether `generate` was called
    refusal: str | None = None  # why it is not answered
    status: int = 400  # the status of the refusal
    stats: SpeculativeStats | None = None  # None before the end and after plain decoding
    unfinished_end: str = ""  # the end of a stream's text that is no whole character
    # The tokens of its answer: where their text begins and ends, and their log probabilities
    places: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    group: Any = None  # the queue's, one for all texts of a body
    streams: bool = False  # whether its answer is a stream
    grammar: Any = None  # the processor that obeys its schema or tools, once it is compiled
    # Set when nobody waits any more; of the event loop `loop`.
    over: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None
    # Called in the event loop when its prompt has tokens, and when nobody waits any more
    when_read: Callable[[], object] = lambda: None
    when_over: Callable[[], object] = lambda: None
    abort: Callable[[], object] = lambda: None  # ends its connection

    def end(self, refusal: str | None = None, status: int = 400) -> None:
        """Give the request up, from any thread; say why, unless its client has gone."""
        if self.is_cancelled:
            return
        if refusal is not None and self.refusal is None:
            self.refusal, self.status = refusal[:MOST_SAID], status
        self.is_cancelled = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.over.set()
        self.when_over()


MOST_SAID = 1000  # Characters of an answer to a request that is refused
STOPPING = "the server is stopping: ask again later"


class Live:
    """The requests of a server that are not answered yet."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self.requests: set[ServedRequest] = set()
        self.coming: set[ServedRequest] = set()  # whose bodies are being sent
        self.num_bytes = 0  # of these
        self.is_ending = False  # whether no more are served

    def check(self, num_new: int) -> None:
        """Refuse so many texts, of which a request may ask for several, if too many wait."""
        if self.is_ending:
            raise Refused(STOPPING, 503)
        if num_new > (most := self._most_waiting):
            raise Refused(f"a request asks for {most} texts at most here: send several requests")
        if num_new + sum(not each.has_begun for each in self.requests) > most:
            raise Refused("too many requests are waiting: try again later", 429)

    def end(self) -> None:
        """End all requests, also from a handler of a signal."""
        self.is_ending = True
        for each in [*self.requests, *self.coming]:
            each.end(STOPPING, 503)


current: ContextVar[ServedRequest | None] = ContextVar("lookahead_hf_request", default=None)
"""The request that is being served."""


def allowed(
    asked: Any, config: SpeculativeConfig, pools: Mapping[str, Any]
) -> SpeculativeConfig | bool | None:
    """Return how a request speculates, with the server's or a named pool, or raise ValueError."""
    if asked is None or asked is False:
        return asked
    if asked is True:
        return config
    pool, fields = config.pool, dict(asked) if isinstance(asked, Mapping) else {}
    if fields.get("pool") in [*pools]:
        pool = pools[fields.pop("pool")]
        asked = fields
    options = fields.get("options")
    of_drafters = options.values() if isinstance(options, Mapping) else ()
    for given in (fields, *of_drafters):
        for name, remedy in OF_THE_SERVER.items():
            if isinstance(given, Mapping) and given.get(name):
                raise ValueError(f"a request cannot set {name}, which is the server's: {remedy}")
    try:
        of_request = SpeculativeConfig.resolve(asked)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"speculative={shown(asked)} is not understood: {error}") from error
    assert of_request is not None
    if pool is not config.pool or of_request.drafters is None or "pool" in of_request.drafters:
        return dataclasses.replace(of_request, pool=pool)
    return of_request

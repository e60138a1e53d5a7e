"""Lets requests in, one by one: keys, limits and fields first, then transformers' server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.queue.request import request_seed
from lookahead_hf.tools.serving.answers import FAILED, Answer, Reply
from lookahead_hf.tools.serving.checks import (
    COMPLETIONS,
    REFUSED,
    UnknownModelError,
    check_fields,
    check_model,
    parsed,
)
from lookahead_hf.tools.serving.fields import STOPPING, Live, ServedRequest, current, take_request
from lookahead_hf.tools.serving.limits import Limits
from lookahead_hf.tools.serving.schemas import take_schema, take_tools

PATHS = tuple(REFUSED)
"""Where a request in JSON is answered with generated text."""

OPEN = ("/health", "/metrics")
"""What is answered without a key."""

_OF_REQUESTS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a request can cause before anything is generated: they are its own."""

_logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request is not served: why, with which status and code."""

    def __init__(self, why: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(why)
        self.given = why, status, code


class Entrance:
    """An ASGI middleware that admits requests, and ends those for which nobody waits any more.

    Args:
        app: The application that answers.
        config: How to speculate by default.
        models: transformers' manager of the server's models.
        limits: What is granted to a request.
        key: What clients have to show, None if they need nothing.
        live: Holds the requests that are not answered yet.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: SpeculativeConfig,
        models: Any,
        limits: Limits,
        key: str | None,
        live: Live,
    ) -> None:
        self._app, self._config, self._models = app, config, models
        self._limits, self._key = limits, key
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks for."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = ServedRequest(loop=asyncio.get_running_loop())
        reply = Reply(request, send, Answer([request]), holds=False)
        try:
            self._check_key(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            if self._live.is_ending:
                raise Refused(STOPPING, 503)
            if sum(not each.has_begun for each in self._live.requests) >= self._limits.waiting:
                raise Refused("too many requests are waiting: try again later", 429)
            self._live.requests.add(request)
            try:
                body = await self._read(scope, receive)
                await self._serve(scope, body, request, receive, send)
            finally:
                self._live.requests.discard(request)
        except Refused as refused:
            await reply.refuse(*refused.given)
        except ConnectionAbortedError:  # before the whole body was there
            return

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN:
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not is_right:
            raise Refused("this server needs its API key", 401, "invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request."""
        most = int(self._limits.body_mb * 1e6)
        too_large = Refused(f"a request has {self._limits.body_mb:g} MB at most: send less", 413)
        said = Headers(scope=scope).get("content-length", "")
        if said.isdecimal() and int(said[:20]) > most:
            raise too_large
        body = bytearray()

        async def read() -> bytes:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionAbortedError
                body.extend(message.get("body", b""))
                if len(body) > most:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)

        try:
            return await asyncio.wait_for(read(), self._limits.seconds)
        except asyncio.TimeoutError:
            raise Refused(f"the request was not sent in {self._limits.seconds:g} seconds") from None

    async def _serve(
        self, scope: Scope, body: bytes, request: ServedRequest, receive: Receive, send: Send
    ) -> None:
        """Check a request's fields, and let the application answer it."""
        path = scope["path"]
        # Ids name requests in the queue, so a client must not choose that of another one.
        headers = [each for each in scope["headers"] if each[0] != b"x-request-id"]
        scope = {**scope, "headers": headers}
        if path not in PATHS:
            self._check_other(path, body)
            await self._answer([body], scope, receive, send, Answer([request]), holds=False)
            return
        headers = [each for each in headers if each[0] not in (b"content-type", b"content-length")]
        scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        try:
            fields = parsed(body)
            requests, bodies, num_prompts = self._take(path, fields)
        except UnknownModelError as unknown:
            raise Refused(str(unknown), 404, "model_not_found") from unknown
        except ValueError as wrong:
            raise Refused(str(wrong)) from wrong
        self._live.requests.discard(request)
        self._live.requests.update(requests)
        try:
            await self._answer(bodies, scope, receive, send, Answer(requests, num_prompts))
        finally:
            self._live.requests.difference_update(requests)

    def _check_other(self, path: str, body: bytes) -> None:
        """Check a request for something else than a text."""
        only_model = self._models.force_model
        if path == "/reset" and only_model is not None:
            raise Refused("this server keeps its model", 403)
        if path in ("/load_model", "/v1/systemone"):
            try:
                check_model(parsed(body).get("model"), only_model)
            except UnknownModelError as unknown:
                raise Refused(str(unknown), 404, "model_not_found") from unknown
            except ValueError as wrong:
                raise Refused(str(wrong)) from wrong

    def _take(
        self, path: str, fields: dict[str, Any]
    ) -> tuple[list[ServedRequest], list[bytes], int]:
        """Return the requests for one text each, their bodies, and the number of prompts."""
        check_fields(path, fields, self._models.force_model, self._limits)
        taken = take_request(fields, self._config)
        taken.schema, taken.tools = take_schema(fields), take_tools(fields)
        self._check_size(taken)
        taken.is_alone = _is_alone(taken, fields)
        given = fields.get("prompt") if path == COMPLETIONS else None
        prompts = given if isinstance(given, list) else [given]
        each, loop = int(fields.pop("n", None) or 1), asyncio.get_running_loop()
        requests: list[ServedRequest] = []
        bodies = []
        for prompt in prompts:
            body = fields if prompt is None else {**fields, "prompt": prompt}
            for _ in range(each):
                index, seed = len(requests), taken.seed
                if seed is not None and index:
                    seed = request_seed(seed, index)
                own: dict[str, Any] = {"over": asyncio.Event(), "when_over": [], "places": []}
                request = dataclasses.replace(taken, loop=loop, seed=seed, **own)
                requests.append(request)
                bodies.append(json.dumps(body).encode())
        return requests, bodies, len(prompts)

    def _check_size(self, request: ServedRequest) -> None:
        given = request.schema if request.tools is None else json.dumps(request.tools)
        if len(given or "") > self._limits.schema_kb * 1000:
            raise ValueError(f"a schema has {self._limits.schema_kb:g} KB at most: shorten it")

    async def _answer(
        self,
        bodies: Sequence[bytes],
        scope: Scope,
        receive: Receive,
        send: Send,
        answer: Answer,
        holds: bool = True,
    ) -> None:
        """Run the application for each request; notice at once if the client goes away."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            answer.end()

        watching = asyncio.ensure_future(watch())
        try:
            given = [
                (request, body, Reply(request, send, answer, holds=holds))
                for request, body in zip(answer.requests, bodies, strict=True)
            ]
            await asyncio.gather(*(self._run(*each, scope) for each in given))
        finally:
            watching.cancel()

    async def _run(self, request: ServedRequest, body: bytes, reply: Reply, scope: Scope) -> None:
        """Run the application for one request, until it ends or nobody waits any more."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def next_message() -> Message:
            if not unread:
                await request.over.wait()
                return {"type": "http.disconnect"}
            return unread.pop()

        current.set(request)
        own = {**scope, "state": dict(scope.get("state") or {})}
        answering = asyncio.ensure_future(self._app(own, next_message, reply))
        over = asyncio.ensure_future(request.over.wait())
        seconds = self._limits.seconds
        try:
            both = {answering, over}
            done, _ = await asyncio.wait(both, timeout=seconds, return_when="FIRST_COMPLETED")
            if not done:
                request.end(f"an answer takes {seconds:g} seconds at most: ask for fewer tokens")
            if answering not in done:
                answering.cancel()
                await asyncio.wait({answering})
            _explain(request, None if answering.cancelled() else answering.exception())
        finally:
            request.end()
            answering.cancel()
            over.cancel()
        if request.refusal is not None:
            await reply.refuse(request.refusal, request.status)


def _explain(request: ServedRequest, error: BaseException | None) -> None:
    """Say why a request was not answered, if that is not known yet."""
    if error is None or request.refusal is not None or request.is_cancelled:
        return
    if isinstance(error, TemplateError):
        request.refusal = f"the model's chat template refuses the messages: {error}"
    elif request.tools is not None and isinstance(error, ValueError):
        why = str(error).partition("\n")[0]  # transformers reads whole calls alone
        request.refusal = f"the answer ends within a tool's call: allow more tokens ({why})"
    elif isinstance(error, _OF_REQUESTS) and not request.generates:
        _logger.warning("a request was refused", exc_info=error)
        request.refusal = "the request is not understood: compare its fields with OpenAI's API"
    else:
        _logger.error("a request failed", exc_info=error)
        request.refusal, request.status = FAILED, 500


def _is_alone(request: ServedRequest, fields: dict[str, Any]) -> bool:
    """Return whether a request asks for what cannot be decoded beside others."""
    settings = json.loads(fields.get("generation_config") or "{}")
    usual = {"num_beams": 1, "speculative": None, "guidance_scale": 1}
    own = request.prediction is not None or request.media is not None
    return own or any(settings.get(name, each) not in (None, each) for name, each in usual.items())

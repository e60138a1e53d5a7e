"""Reads our fields from requests, and adds fields of ours to answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from jinja2 import TemplateError
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.tools.serving.fields import (
    REFUSED,
    ServedRequest,
    UnknownModelError,
    add_to_answer,
    add_to_events,
    as_error,
    check_fields,
    current,
    error,
    take_request,
)
from lookahead_hf.tools.serving.schemas import take_schema, take_tools

PATHS = tuple(REFUSED)
"""Where a request in JSON is answered with generated text."""


class SpeculativeFields:
    """An ASGI middleware that sets `current` for every request for a text.

    Args:
        app: The application that answers.
        config: How to speculate by default.
        models: transformers' manager of the server's models.
    """

    def __init__(self, app: ASGIApp, config: SpeculativeConfig, models: Any) -> None:
        self._app, self._config, self._models = app, config, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks for."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        try:
            body, request = self._take(scope["path"], body)
        except UnknownModelError as unknown:
            await _refusal(str(unknown), 404, "model_not_found")(scope, receive, send)
            return
        except ValueError as wrong:
            await _refusal(str(wrong))(scope, receive, send)
            return
        reply = _Reply(request, send)
        await self._answer(request, body, scope, receive, reply)
        if request.refusal is not None and not reply.has_started:
            await _refusal(request.refusal)(scope, receive, send)

    def _take(self, path: str, body: bytes) -> tuple[bytes, ServedRequest]:
        """Return the body without our fields, and the request that they describe."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None  # transformers says what is wrong
        if not isinstance(fields, dict):
            return body, ServedRequest()
        check_fields(path, fields, self._models.force_model)
        request = take_request(fields, self._config)
        request.schema, request.tools = take_schema(fields), take_tools(fields)
        return json.dumps(fields).encode(), request

    async def _answer(
        self, request: ServedRequest, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application; meanwhile, notice at once if the client goes away."""
        gone = asyncio.Event()
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            request.is_cancelled = True
            gone.set()

        async def next_message() -> Message:
            if not unread:
                await gone.wait()
                return {"type": "http.disconnect"}
            return unread.pop()

        current.set(request)
        watching = asyncio.ensure_future(watch())
        try:
            await self._app(scope, next_message, send)
        except Exception as error:
            if isinstance(error, TemplateError):
                request.refusal = f"the model's chat template refuses the messages: {error}"
            if request.refusal is None and not request.is_cancelled:
                if request.tools is None or not isinstance(error, ValueError):
                    raise
                why = str(error).partition("\n")[0]  # transformers reads whole calls alone
                request.refusal = f"the answer ends within a tool's call: allow more tokens ({why})"
        finally:
            watching.cancel()


class _Reply:
    """Sends an answer with its statistics, holding a stream back until its first token.

    Until then `generate` may refuse its arguments, and the client gets an ordinary error.
    """

    def __init__(self, request: ServedRequest, send: Send) -> None:
        self._request, self._send = request, send
        self.has_started = False
        self._start: Message = {}
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start, self._headers = message, MutableHeaders(scope=message)
            return
        is_last = not message.get("more_body", False)
        self._held += message.get("body", b"")
        is_stream = self._headers.get("content-type", "").startswith("text/event-stream")
        if not is_last and not (is_stream and self._request.has_begun):
            return
        if self._request.refusal is not None and not self.has_started:
            return
        add = add_to_events if is_stream else add_to_answer
        body, self._held = add(self._held, self._request), b""
        if self._start["status"] >= 400:
            body = as_error(body)
        if not self.has_started:
            self.has_started = True
            if not is_stream:
                self._headers["content-length"] = str(len(body))
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _refusal(why: str, status: int = 400, code: str | None = None) -> JSONResponse:
    return JSONResponse(error(why, code), status)

"""The server: transformers' own behind our entrance, with speculation and counters."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import transformers
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import GenerationMixin

from lookahead_hf.call.prepared import Request
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import TRANSFORMERS
from lookahead_hf.generation.decode import build_drafters
from lookahead_hf.model import compat
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.tools.serving.answers import FAILED, Answer, Reply
from lookahead_hf.tools.serving.checks import REFUSED, check_decisions, check_model, take_requests
from lookahead_hf.tools.serving.fields import USUAL, Limits, Live, Refused, ServedRequest, current
from lookahead_hf.tools.serving.reading import reach_of, read, reading
from lookahead_hf.tools.serving.schemas import for_calls, trials

if TYPE_CHECKING:
    from lookahead_hf.tools.serving.running import Running

PREFIX = "lookahead_hf:spec_decode_num_"


class Metrics:
    """Counts what all requests of one server drafted and accepted."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Any:
            return Counter(PREFIX + name, what, labels, registry=self._registry)

        self._drafts = counter("drafts", "Steps that verified a draft, in every row.")
        self._draft_tokens = counter("draft_tokens", "Draft tokens verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "accepted_tokens_per_pos", "Draft tokens accepted, by their place.", "position"
        )

    def count(self, stats: SpeculativeStats) -> None:
        """Add the statistics of one call of `generate`."""
        histogram = stats.accepted_histogram  # [most accepted in a step + 1]
        self._drafts.inc(stats.row_steps)
        self._draft_tokens.inc(stats.num_drafted)
        self._accepted.inc(stats.num_accepted)
        at_least = list(accumulate(reversed(histogram)))[::-1]  # steps that accepted k or more
        for position, count in enumerate(at_least[1:]):
            self._accepted_at.labels(position).inc(count)

    def answer(self) -> Response:
        """Return all counters in Prometheus' text format."""
        return Response(
            bytes(generate_latest(self._registry)), headers={"content-type": CONTENT_TYPE_LATEST}
        )


SEAMS = (
    "server.build_server",
    "model_manager.ModelManager.load_model_and_processor",
    "utils.GenerationState.get_manager",
    "utils.GenerationState.use_continuous_batching",
    "utils.CBGenerateManager.init_cb",
    "utils.GenerateManager.submit",
    "utils.GenerateManager.async_submit",
)
"""The parts of `transformers.cli.serving` that are altered."""


class UnknownServerError(RuntimeError):
    """The server of the installed transformers is not the one that this module alters."""


@contextmanager
def speculating(
    config: SpeculativeConfig,
    prepare: Callable[[Any], object] = lambda model: None,
    *,
    limits: Limits = USUAL,
    api_key: str | None = None,
    together: bool = True,
    pools: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[None]:
    """Let servers of one model that are built inside the `with` block generate speculatively.

    Building a server raises ValueError if it has no model, or if `config` does not suit the model,
    such as a pool of another tokenizer; UnknownServerError if transformers has another server.

    Args:
        config: How to speculate by default.
        prepare: Called with the model before its first request, such as `warm_up`.
        limits: What is granted to a request.
        api_key: What clients have to show, None if they need nothing.
        together: Whether requests are decoded together, by our queue.
        pools: The pools that a request may name.
    """
    server = _known_server()
    from lookahead_hf.tools.serving.running import Running, ServedGenerate

    original = server.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        metrics, live, manager = Metrics(), Live(limits.waiting), given["model_manager"]
        only_model = manager.force_model
        if only_model is None:
            raise ValueError("name the MODEL to serve, a folder or a name of the hub")
        running = Running(given["generation_state"], config, limits, together)
        for name in ("chat_handler", "completion_handler", "response_handler"):
            given[name].handle_request = reading(running.readers, given[name].handle_request)
        speech, name = given["transcription_handler"], compat.SERVERS_SOUND_READER
        setattr(speech, name, partial(_prepare_sound, getattr(speech, name)))
        app = original(*args, **kwargs)

        def enable(model: Any, processor: Any) -> None:
            if isinstance(model, GenerationMixin) and running.reach.tokenizer is None:
                for pool in (config.pool, *pools.values()):
                    own = Request(replace(config, pool=pool), tokenizer=processor)
                    build_drafters(model, own, 1, False)
                running.reach = reach_of(model, processor, limits)
                vars(model)["generate"] = ServedGenerate(model, running, metrics.count)
                prepare(model)

        _enable_model(manager, enable)
        if hasattr(manager, "get_gen_models"):  # before transformers 5.24
            manager.get_gen_models = lambda: [
                {"id": only_model, "object": "model", "created": 0, "owned_by": ""}
            ]
        app.add_middleware(
            Entrance, running=running, model=only_model, pools=pools, key=api_key, live=live
        )
        # Browsers ask without a key first, and read errors only from an answer that allows it.
        app.user_middleware.sort(key=lambda each: each.cls is not CORSMiddleware)
        app.add_api_route("/metrics", metrics.answer, response_model=None, include_in_schema=False)
        _end_with(app, running.end)
        app.state.end_requests = live.end
        return app

    server.build_server = build_server
    try:
        yield
    finally:
        server.build_server = original


END_SECONDS = 5  # The longest wait for a client to read the end of an answer


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let servers end their requests at the first signal, and the process at the second one."""
    import uvicorn

    original = uvicorn.Server.handle_exit

    def handle_exit(server: Any, *args: Any) -> None:
        if server.should_exit:
            trials.kill()
            os._exit(130)  # whatever is computed, since a step may take long
        original(server, *args)
        server.config.timeout_graceful_shutdown = END_SECONDS  # for clients that do not read
        state = getattr(server.config.app, "state", None)
        getattr(state, "end_requests", lambda: None)()

    uvicorn.Server.handle_exit = handle_exit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        uvicorn.Server.handle_exit = original  # type: ignore[method-assign]


def _prepare_sound(prepare: Callable[..., Any], data: bytes, *args: Any) -> Any:
    """Call the function with which transformers' server reads a sound, unless it reads a file."""
    if os.path.isfile(b64encode(data)):
        raise ValueError("the sound has the name of a file")
    return prepare(data, *args)


def _end_with(app: Any, end: Callable[[], object]) -> None:
    """Let the threads of a server end with it."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        gc.freeze()  # or each large body has the whole model's objects looked through
        async with inner(app) as state:
            yield state
        gc.unfreeze()
        end()
        trials.end()

    app.router.lifespan_context = lifespan


def _known_server() -> Any:
    """Return the module of `build_server`, after checking that all `SEAMS` exist."""
    try:
        from transformers.cli import serving
        from transformers.cli.serving import model_manager, server, utils  # noqa: F401

        for seam in SEAMS:
            attrgetter(seam)(serving)
        inspect.signature(server.build_server).bind_partial(
            model_manager=None, generation_state=None
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise UnknownServerError(
            f"the server of transformers {transformers.__version__} is not known ({error}): "
            f"pip install 'transformers{TRANSFORMERS}', or a later lookahead-hf"
        ) from error
    return server


def _enable_model(manager: Any, enable: Callable[[Any, Any], None]) -> None:
    """Enable the manager's model, now or when it is loaded, and let it load no other one."""
    load, known = manager.load_model_and_processor, [*manager.loaded_models]

    def load_and_enable(name: str, *args: Any, **kwargs: Any) -> Any:
        # Behind a colon is the file of a GGUF.
        if not any(f"{each}:".startswith(f"{name}:") for each in known):
            check_model(name, manager.force_model)
        model, processor = load(name, *args, **kwargs)
        enable(model, processor)
        return model, for_calls(processor, model, current.get())

    for timed in manager.loaded_models.values():
        enable(timed.model, timed.processor)
    manager.load_model_and_processor = load_and_enable


PATHS = tuple(REFUSED)  # Where a request in JSON is answered with generated text
OPEN = ("/health", "/metrics")  # What is answered without a key

_OF_REQUESTS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a request can cause before anything is generated: they are its own."""

_logger = logging.getLogger(__name__)


class Entrance:
    """An ASGI middleware that admits requests, and ends those for which nobody waits any more.

    Clients have to show the `key`, unless it is None; `live` holds unanswered requests.
    """

    def __init__(
        self, app: ASGIApp, running: Running, model: str, pools: Any, key: str | None, live: Live
    ) -> None:
        self._app, self._running, self._limits = app, running, running.limits
        self._only_model, self._pools, self._key, self._live = model, pools, key, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks for."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, live = ServedRequest(loop=asyncio.get_running_loop()), self._live
        with suppress(AttributeError):  # of uvicorn
            request.abort = receive.__self__.transport.abort
        try:
            self._check_key(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            body = await self._read(scope, request, receive)
            live.check(1)
            live.requests.add(request)
            try:
                await self._serve(scope, body, request, receive, send)
            finally:
                live.requests.discard(request)
        except Refused as refused:
            await Reply(request, send, Answer([request]), holds=False).refuse(*refused.given)
        except ConnectionAbortedError:  # before the whole body was there
            return

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or (scope["path"] in OPEN and scope["method"] != "POST"):
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not is_right:
            raise Refused("this server needs its API key", 401, "invalid_api_key")

    async def _read(self, scope: Scope, request: ServedRequest, receive: Receive) -> bytes:
        """Return the body of a request; those that come slowly may take memory, too."""
        live = self._live
        live.check(0)
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
                live.num_bytes += len(message.get("body", b""))
                if len(body) > most:
                    raise too_large
                if live.num_bytes > most * self._limits.waiting:
                    raise Refused("too many requests are being sent: try again later", 429)
                if not message.get("more_body", False):
                    return bytes(body)

        whole = asyncio.ensure_future(read())
        request.when_over = whole.cancel
        live.coming.add(request)
        try:
            return await asyncio.wait_for(whole, self._limits.seconds)
        except asyncio.TimeoutError:
            raise Refused(f"the request was not sent in {self._limits.seconds:g} seconds") from None
        except asyncio.CancelledError:
            live.check(0)  # or the server itself has cancelled it
            raise
        finally:
            live.coming.discard(request)
            live.num_bytes -= len(body)

    async def _serve(
        self, scope: Scope, body: bytes, request: ServedRequest, receive: Receive, send: Send
    ) -> None:
        """Check a request's fields, and let the application answer it."""
        path, running = scope["path"], self._running
        is_text = path in PATHS
        requests, num_prompts = [request], 1
        try:
            if is_text:
                given = path, body, running.config, self._only_model, self._limits, self._pools
                taking = read(running.readers, take_requests, *given, running.reach)
                (requests, num_prompts), body = await taking, b"{}"
            elif path == "/reset":
                raise Refused("this server keeps its model", 403)
            elif path in ("/load_model", "/v1/systemone"):
                model = self._only_model
                await read(running.readers, check_decisions, body, model, running.reach)
        except ValueError as wrong:
            raise Refused(str(wrong)) from wrong
        except RecursionError as wrong:
            raise Refused("the request is too deep: send fewer nested values") from wrong
        # Ids name requests in the queue, so a client must not choose that of another one.
        left_out = [b"x-request-id", *([b"content-type", b"content-length"] if is_text else [])]
        headers = [each for each in scope["headers"] if each[0] not in left_out]
        headers += [(b"content-type", b"application/json")] if is_text else []
        scope = {**scope, "headers": headers}
        for each in requests:
            each.loop, each.abort = request.loop, request.abort
        answer, live = Answer(requests, num_prompts), self._live
        live.requests.discard(request)
        live.check(len(requests))
        live.requests.update(requests)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            answer.end()

        watching = asyncio.ensure_future(watch())
        try:
            replies = [(each, Reply(each, send, answer, holds=is_text)) for each in requests]
            await asyncio.gather(*(self._run(each, body, reply, scope) for each, reply in replies))
        finally:
            watching.cancel()
            live.requests.difference_update(requests)

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
        late = asyncio.get_running_loop().call_later(seconds + END_SECONDS, request.abort)
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
        late.cancel()


def _explain(request: ServedRequest, error: BaseException | None) -> None:
    """Say why a request was not answered, if that is not known yet."""
    if error is None or request.refusal is not None or request.is_cancelled:
        return
    if isinstance(error, Refused):
        request.refusal, request.status, _ = error.given
    elif isinstance(error, TemplateError):
        request.refusal = f"the model's chat template refuses the messages: {error}"
    elif request.tools is not None and isinstance(error, ValueError):
        why = str(error).partition("\n")[0]  # transformers reads whole calls alone
        remedy = "leave out stop, or allow more tokens" if request.stop else "allow more tokens"
        request.refusal = f"the answer ends within a tool's call: {remedy} ({why})"
    elif isinstance(error, ImportError):
        request.refusal = f"this server lacks a package: {str(error).strip()}"
    elif isinstance(error, _OF_REQUESTS) and not request.generates:
        _logger.warning("a request was refused", exc_info=error)
        request.refusal = "the request is not understood: compare its fields with OpenAI's API"
    else:
        _logger.error("a request failed", exc_info=error)
        request.refusal, request.status = FAILED, 500

"""The server: transformers' own with speculation, and its counters."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import accumulate
from operator import attrgetter
from typing import Any

import transformers
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from transformers import GenerationMixin

import lookahead_hf
from lookahead_hf import stats
from lookahead_hf.call.prepared import Request
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import TRANSFORMERS
from lookahead_hf.generation.assembly import build_drafters
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.tools.serving.answers import unfinished_end
from lookahead_hf.tools.serving.compiling import trials
from lookahead_hf.tools.serving.fields import Live, ServedRequest, allowed, current, listing
from lookahead_hf.tools.serving.limits import USUAL, Limits
from lookahead_hf.tools.serving.middleware import Entrance
from lookahead_hf.tools.serving.running import Running, add_to_call
from lookahead_hf.tools.serving.schemas import check_media, for_calls
from lookahead_hf.verification import rng

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

    def text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return bytes(generate_latest(self._registry))


SEAMS = (
    "server.build_server",
    "model_manager.ModelManager.load_model_and_processor",
    "utils.GenerationState.get_manager",
    "utils.GenerationState.use_continuous_batching",
    "utils.CBGenerateManager.init_cb",
    "utils.InferenceThread",
    "utils.GenerateManager.submit",
    "utils.GenerateManager.async_submit",
)
"""The parts of `transformers.cli.serving` that are altered."""


class Cancelled(Exception):
    """Ends a generation whose client went away."""


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
) -> Iterator[None]:
    """Let servers that transformers builds inside the `with` block generate speculatively.

    Building a server raises ValueError if `config` does not suit its model, such as a pool of
    another tokenizer.

    Args:
        config: How to speculate by default.
        prepare: Called with each model before its first request, such as `warm_up`.
        limits: What is granted to a request.
        api_key: What clients have to show, None if they need nothing.
        together: Whether requests are decoded together, by our queue.

    Raises:
        UnknownServerError: The installed transformers has another server.
    """
    server = _known_server()
    original = server.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        metrics, live, manager = Metrics(), Live(), given["model_manager"]
        state = given["generation_state"]
        running = Running(state, manager, live, config, limits, together)

        def enable(model: Any, processor: Any) -> None:
            if isinstance(model, GenerationMixin) and not _is_served(model):
                build_drafters(model, Request(config, tokenizer=processor), 1, False)
                served = ServedGenerate(model, processor, config, metrics, limits)
                vars(model)["generate"] = served
                running.tokenizers[model] = processor
                prepare(model)

        _enable_models(manager, enable)
        if hasattr(manager, "get_gen_models"):  # before transformers 5.24
            manager.get_gen_models = listing(manager)
        app.add_middleware(
            Entrance,
            config=config,
            models=manager,
            limits=limits,
            key=api_key,
            live=live,
        )
        # Browsers ask without a key first, and read errors only from an answer that allows it.
        app.user_middleware.sort(key=lambda each: each.cls is not CORSMiddleware)
        _add_route(app, metrics)
        _end_with(app, running)
        app.state.end_requests = live.end
        return app

    server.build_server = build_server
    try:
        yield
    finally:
        server.build_server = original


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let servers end their requests at the first signal, instead of waiting for their texts."""
    import uvicorn

    original = uvicorn.Server.handle_exit

    def handle_exit(server: Any, *args: Any) -> None:
        original(server, *args)
        state = getattr(server.config.app, "state", None)
        getattr(state, "end_requests", lambda: None)()

    uvicorn.Server.handle_exit = handle_exit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        uvicorn.Server.handle_exit = original  # type: ignore[method-assign]


def _end_with(app: Any, running: Running) -> None:
    """Let the threads of a server end with it."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with inner(app) as state:
            yield state
        running.end()
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


def _enable_models(manager: Any, enable: Callable[[Any, Any], None]) -> None:
    """Enable the manager's models, now and as it loads them."""
    load = manager.load_model_and_processor

    def load_and_enable(*args: Any, **kwargs: Any) -> Any:
        request = current.get()
        try:
            model, processor = load(*args, **kwargs)
        except (OSError, ValueError) as error:
            if request is not None:
                why = str(error).strip().partition("\n")[0]
                request.refusal = f"the model cannot be loaded: {why}"
            raise
        enable(model, processor)
        return model, for_calls(processor, model, request)

    for timed in manager.loaded_models.values():
        enable(timed.model, timed.processor)
    manager.load_model_and_processor = load_and_enable


def _add_route(app: Any, metrics: Metrics) -> None:
    def show() -> Any:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    app.add_api_route("/metrics", show, response_model=None, include_in_schema=False)


def _is_served(model: Any) -> bool:
    return isinstance(vars(model).get("generate"), ServedGenerate)


_logger = logging.getLogger(__name__)


class ServedGenerate:
    """Replaces `generate` of a served model, and applies the fields of the current request.

    Args:
        model: The model, which gets enabled.
        tokenizer: Its tokenizer, or the processor that has it.
        config: How to speculate by default.
        metrics: Counts draft tokens.
        limits: What is granted to a request.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: SpeculativeConfig,
        metrics: Metrics,
        limits: Limits = USUAL,
    ) -> None:
        self._generate = lookahead_hf.enable(model, config).generate
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._limits = limits
        lookahead_hf.on_stats(model, metrics.count)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = current.get() or ServedRequest()
        if request.is_cancelled:
            raise Cancelled
        request.generates = True
        config = kwargs.get("generation_config")
        if request.samples and config is not None:
            config.do_sample = True
        if request.prediction is not None:
            kwargs["prediction"] = request.prediction
        if kwargs.get("streamer") is not None or _takes_streamer(self._model, config):
            kwargs["streamer"] = _Watched(
                request, kwargs.get("streamer"), self._model, self._tokenizer
            )
        try:
            self._apply(request, kwargs, config)
            kwargs["speculative"] = self._speculative(request, config)
            with rng.drawing(self._model.device, request.seed):
                output = self._generate(*args, **kwargs)
        except Cancelled:
            raise
        except Exception as error:
            # What a request sets itself is refused by torch as well.
            own = request.length == "generation_config" and not request.has_begun
            if isinstance(error, ValueError) or own:
                request.refusal = str(error).strip().partition("\n")[0] or type(error).__name__
            else:
                _logger.exception("a request failed")
            raise
        request.stats = stats.of_this_thread(self._model)
        return output

    def _apply(self, request: ServedRequest, kwargs: dict[str, Any], config: Any) -> None:
        """Add what a request asks for to the arguments of its generation."""
        check_media(request, kwargs)
        ids = kwargs.get("input_ids")
        if config is None or ids is None:
            return
        num_prompt, model, tokenizer = ids.shape[-1], self._model, self._tokenizer
        added = add_to_call(request, config, num_prompt, model, tokenizer, self._limits)
        for name, own in added.items():
            kwargs[name] = [*(kwargs.get(name) or ()), *own]

    def _speculative(self, request: ServedRequest, config: Any) -> Any:
        """Return how to speculate: as the request says, else the model, else the server.

        A client can send a generation config of its own, which must not open files either.
        """
        if request.speculative is not None:
            return request.speculative
        asked = getattr(config, "speculative", None)
        of_model = getattr(self._model.generation_config, "speculative", None)
        if asked is not None and asked != of_model:
            return allowed(asked, self._config)
        return self._config if of_model is None else of_model


def _takes_streamer(model: Any, config: Any) -> bool:
    """Whether a request without a streamer can get one: not for beams."""
    beams = [getattr(each, "num_beams", None) for each in (config, model.generation_config)]
    return not model.config.is_encoder_decoder and (beams[0] or beams[1] or 1) == 1


class _Watched:
    """Wraps a request's streamer, or stands in for a missing one.

    It ends the generation if the client went away, and stores the statistics before the client sees
    the end of the text.
    """

    def __init__(self, request: ServedRequest, streamer: Any, model: Any, tokenizer: Any) -> None:
        self._request, self._streamer, self._model = request, streamer, model
        self._tokenizer, self._tokens = tokenizer, list[int]()

    def put(self, value: Any) -> None:
        """Pass a value on: the prompt, [1, length], or a token, [1]."""
        if self._request.is_cancelled:
            raise Cancelled
        if value.ndim == 1:
            self._request.has_begun = True
            self._tokens += value.tolist()
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """Pass the end of the text on."""
        self._request.stats = stats.of_this_thread(self._model)
        if self._request.streams:
            self._request.unfinished_end = unfinished_end(self._tokens, self._tokenizer)
        if self._streamer is not None:
            self._streamer.end()

"""Runs requests: one after the other in transformers' threads, or together in our queue."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from lookahead_hf.call.stopping import StopTexts
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import Unserved
from lookahead_hf.logits.row_processors import PresencePenalty
from lookahead_hf.model import compat
from lookahead_hf.queue.manager import SpeculativeBatchingManager
from lookahead_hf.queue.methods import BatchOptions, engine_of
from lookahead_hf.tools.serving.answers import FAILED, places, unfinished_end
from lookahead_hf.tools.serving.fields import STOPPING, Live, ServedRequest, current
from lookahead_hf.tools.serving.limits import Limits
from lookahead_hf.tools.serving.schemas import grammar_of

STOP_SECONDS = 10.0
"""The longest wait for the thread of a queue, which ends within a step."""

_OF_SERVER = (
    *("max_new_tokens", "eos_token_id", "use_cache", "cache_implementation"),
    *("transformers_version", "num_return_sequences", "continuous_batching_config", "speculative"),
)
"""Settings that a text in a queue does not have, or gets in another way."""

_OWN_ERRORS = ("ValueError", "SpeculationFallbackError")
"""Errors of a request's own settings."""

_logger = logging.getLogger(__name__)


def add_to_call(
    request: ServedRequest, config: Any, num_prompt: int, model: Any, tokenizer: Any, limits: Limits
) -> dict[str, list[Any]]:
    """Return the processors and criteria of a request by the names of `generate`'s arguments.

    Args:
        request: The request.
        config: The settings of its text; a default length is lowered to the room there is.
        num_prompt: Tokens of its prompt.
        model: The model.
        tokenizer: Its tokenizer, or the processor that has it.
        limits: What is granted to a request.

    Raises:
        ValueError: There is no room for its text.
    """
    _fit(request, config, num_prompt, model, limits)
    num_prompt = 1 if model.config.is_encoder_decoder else num_prompt
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    own: dict[str, list[Any]] = {"logits_processor": [], "stopping_criteria": []}
    if request.presence_penalty:
        own["logits_processor"].append(PresencePenalty(request.presence_penalty, num_prompt))
    if request.grammar is not None:
        own["logits_processor"].append(request.grammar)
    if request.stop:
        own["stopping_criteria"].append(StopTexts(request.stop, tokenizer, num_prompt))
    return {name: given for name, given in own.items() if given}


def _fit(request: ServedRequest, config: Any, num_prompt: int, model: Any, limits: Limits) -> None:
    most = limits.tokens
    if most is None and not model.config.is_encoder_decoder:
        most = getattr(compat.text_config(model), "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return
    room, asked = most - num_prompt, config.max_new_tokens
    if asked is None and config.max_length is not None:
        asked = config.max_length - num_prompt
    if room < 1 or (request.length is not None and asked is not None and asked > room):
        new = f" and {asked} new ones" if request.length is not None and room > 0 else ""
        raise ValueError(
            f"a prompt of {num_prompt} tokens{new} needs more than the {most} that a text may have "
            "here: shorten it, or ask for fewer tokens"
        )
    if config.max_new_tokens is not None:
        config.max_new_tokens = min(config.max_new_tokens, room)


class Worker(ThreadPoolExecutor):
    """The thread that generates for a model; unlike transformers' own it can end."""

    def __init__(self) -> None:
        super().__init__(1, "lookahead_hf generating")

    def async_submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in the thread; a result that nobody waits for is dropped."""
        return asyncio.wrap_future(self.submit(function, *args, **kwargs))


class Running:
    """Alters the objects of transformers' server that run requests.

    Args:
        state: Its `GenerationState`.
        models: Its manager of models.
        live: The requests that are not answered yet.
        config: How to speculate by default.
        limits: What is granted to a request.
        together: Whether requests are decoded together.

    Attributes:
        tokenizers: The tokenizer of each model, or the processor that has it.
    """

    def __init__(
        self,
        state: Any,
        models: Any,
        live: Live,
        config: SpeculativeConfig,
        limits: Limits,
        together: bool,
    ) -> None:
        self._models, self._live, self._limits = models, live, limits
        self._config, self._together = config, together
        self._batching = getattr(state, compat.SERVERS_QUEUE_CONFIG)
        self._compilers = ThreadPoolExecutor(4, "lookahead_hf compiling")
        self._managers: dict[tuple[str, bool], Any] = {}
        self.tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._queues: dict[Any, SpeculativeBatchingManager | None] = {}
        self._get = state.get_manager
        state.get_manager, state.use_continuous_batching = self.get_manager, self.uses_queue

    def end(self) -> None:
        """End all threads; the requests were answered or given up."""
        for queue in filter(None, self._queues.values()):
            queue.stop(timeout=STOP_SECONDS, hard_stop=True)
        for manager in self._managers.values():
            if hasattr(manager, "_thread"):
                manager._thread.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def uses_queue(self, model: Any, modality: Any) -> bool:
        """Return whether the current request is decoded beside others.

        transformers' own manager never starts.
        """
        request = current.get() or ServedRequest()
        is_alone = request.is_alone or request.speculative not in (None, self._config)
        is_alone |= not self._together or modality.name != "LLM"
        if not is_alone:
            queue = self._queues.get(model)
            if model not in self._queues or (queue is not None and queue.fatal_error is not None):
                self._queues[model] = self._new_queue(model)
            is_alone = self._queues[model] is None
        if is_alone and request.log_probs is not None:
            request.refusal = (
                "logprobs are served where requests are decoded together: leave them out, or "
                "prediction, speculative and beams"
            )
            raise ValueError(request.refusal)
        return not is_alone

    def _new_queue(self, model: Any) -> SpeculativeBatchingManager | None:
        """Start a queue of a model, None if requests have to be decoded one after the other."""
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = config.max_new_tokens or 1024  # each request brings its own
        try:
            engine, _ = engine_of(model, self._config, BatchOptions(), config, self._batching)
        except (Unserved, ValueError) as error:
            _logger.warning("requests are decoded one after the other: %s", error)
            return None
        queue = SpeculativeBatchingManager(engine)
        gives_up = engine.stops

        def stops() -> bool:
            if gives_up() or self._live.requests:
                return gives_up()
            if any(each.model is model for each in list(self._models.loaded_models.values())):
                return False
            self._queues.pop(model, None)  # nothing of an unloaded model stays in memory
            for manager in self._managers.values():
                if getattr(getattr(manager, compat.SERVERS_QUEUE, None), "queue", None) is queue:
                    setattr(manager, compat.SERVERS_QUEUE, None)
            return True

        engine.stops = stops
        queue.start()
        return queue

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """Return transformers' manager of a model's requests, altered."""
        from transformers.cli.serving import utils

        name = model_id, use_cb
        if name in self._managers:
            return self._managers[name]
        threads = utils.InferenceThread
        utils.InferenceThread = Worker  # a manager that is made now gets one
        try:
            manager = utils.CBGenerateManager() if use_cb else self._get(model_id)
        finally:
            utils.InferenceThread = threads
        self._managers[name] = manager
        for method in ("generate_streaming", "generate_non_streaming"):
            streams = method == "generate_streaming"
            setattr(manager, method, self._noting(getattr(manager, method), streams))
        if use_cb:
            manager.init_cb = MethodType(self._init_queue, manager)
        else:
            manager.submit = self._submitting(manager.submit)
            manager.async_submit = self._submitting_async(manager.async_submit)
        return manager

    def _noting(self, original: Callable[..., Any], streams: bool) -> Callable[..., Any]:
        """Return a method that notes how the request's grammar is compiled."""

        def generate(model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            request = current.get()
            if request is not None:
                request.streams = streams
                if request.schema is not None or request.tools is not None:
                    given = request, inputs["input_ids"], self.tokenizers[model]
                    request.compile = partial(grammar_of, *given, self._limits.compile_seconds)
            return original(model, processor, inputs, *args, **kwargs)

        return generate

    def _submitting(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def altered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            request, run = current.get(), contextvars.copy_context().run
            work = partial(submit, run, function, *args, **kwargs)
            if request is None or request.compile is None:
                return work()
            return self._compilers.submit(self._after_compiling, request, work)

        return altered

    def _submitting_async(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        async def altered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            request, run = current.get(), contextvars.copy_context().run
            if request is not None and request.compile is not None:
                ready = self._compilers.submit(self._after_compiling, request, lambda: None)
                await asyncio.wrap_future(ready)
            return await submit(run, function, *args, **kwargs)

        return altered

    def _after_compiling(self, request: ServedRequest, work: Callable[[], Any]) -> Any:
        """Compile a request's grammar, and go on unless that fails or nobody waits any more."""
        try:
            assert request.compile is not None
            request.grammar = None if request.is_cancelled else request.compile()
        except ValueError as error:
            request.end(str(error))
        except Exception:
            _logger.exception("a request failed")
            request.end(FAILED, 500)
        return None if request.is_cancelled else work()

    def _init_queue(self, manager: Any, model: Any, config: Any) -> None:
        """Note a request's settings, and give it what adds it to the queue of its model."""
        request = current.get()
        if request is not None:
            request.config = config
        queue = self._queues[model]
        assert queue is not None
        adding = Adding(queue, partial(self._add, model, queue), self.tokenizers[model])
        setattr(manager, compat.SERVERS_QUEUE, adding)

    def _add(self, model: Any, queue: Any, input_ids: Any, **given: Any) -> Any:
        """Add a request with its own settings, once its handler is there and its grammar."""
        request = current.get() or ServedRequest()
        request.generates = True
        request.when_over.append(partial(queue.cancel_request, given["request_id"]))

        def work() -> None:
            if request.is_cancelled:
                return
            try:
                tokenizer = self.tokenizers[model]
                own = add_to_call(
                    request, request.config, len(input_ids), model, tokenizer, self._limits
                )
                settings = _differences(request.config, queue.generation_config)
                if request.samples:
                    settings["do_sample"] = True
                settings["seed"] = request.seed
                given["max_new_tokens"] = request.config.max_new_tokens
                given["streaming"] = True
                if request.log_probs is not None:
                    settings |= {"top_logprobs": request.log_probs, "return_logprobs": True}
                if queue.add_request(input_ids, **given, **settings, **own) is None:
                    request.end(STOPPING, 503)
            except Exception as error:  # of its own settings: nothing else was done
                _logger.warning("a request was refused", exc_info=error)
                request.end(str(error) or type(error).__name__)

        if request.compile is not None:
            self._compilers.submit(self._after_compiling, request, work)
        else:
            asyncio.get_running_loop().call_soon(work)
        return given["request_id"]


class Adding:
    """A queue as transformers' server sees it for one request.

    Args:
        queue: The queue.
        add: Adds a request instead.
        tokenizer: The tokenizer of its model, or the processor that has it.
    """

    def __init__(
        self, queue: SpeculativeBatchingManager, add: Callable[..., Any], tokenizer: Any
    ) -> None:
        self.queue, self.add_request = queue, add
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.background_thread_status, self.cancel_request = queue, queue.cancel_request

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Register the handler of a request's outputs, of which it is told what it expects."""
        request = current.get() or ServedRequest()

        def hear(output: Any) -> None:
            if output.error is not None:
                kind, _, why = output.error.partition(": ")
                is_own = kind in _OWN_ERRORS or not output.generated_tokens
                request.end(*((why,) if is_own else (FAILED, 500)))
                return
            request.has_begun = True
            if request.log_probs is not None:
                request.places += places(output, len(request.places), self._tokenizer)
            if output.is_finished():
                request.stats = output.speculative_stats
                if request.streams:
                    tokens = output.generated_tokens
                    request.unfinished_end = unfinished_end(tokens, self._tokenizer)
            if request.streams or output.is_finished():
                callback(output)

        self.queue.register_result_handler(request_id, hear)


def _differences(config: Any, default: Any) -> dict[str, Any]:
    """Return the settings of a text that are not those of the queue."""
    asked, usual = config.to_dict(), default.to_dict()
    return {
        name: value
        for name, value in asked.items()
        if name not in _OF_SERVER and value is not None and value != usual.get(name)
    }

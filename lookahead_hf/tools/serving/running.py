"""Runs requests: one after the other in a thread, or together in our queue."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

import lookahead_hf
from lookahead_hf import stats
from lookahead_hf.call.stopping import StopTexts
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import Unserved
from lookahead_hf.logits.row_processors import PresencePenalty
from lookahead_hf.model import compat
from lookahead_hf.queue.manager import SpeculativeBatchingManager
from lookahead_hf.queue.methods import BatchOptions, engine_of
from lookahead_hf.queue.request import ending
from lookahead_hf.tools.serving.answers import FAILED, Pieces, unfinished_end
from lookahead_hf.tools.serving.fields import STOPPING, Limits, Reach, ServedRequest, current
from lookahead_hf.tools.serving.schemas import check_media, grammar_of, task_of, trials
from lookahead_hf.verification import noise

STOP_SECONDS = 10.0  # The longest wait for the thread of a queue, which ends within a step

USUAL_LENGTH = 1024  # New tokens of a text whose request says nothing, as in transformers' server

_OF_SERVER = (
    *("max_new_tokens", "eos_token_id", "use_cache", "cache_implementation"),
    *("transformers_version", "num_return_sequences", "continuous_batching_config", "speculative"),
)
"""Settings that a text in a queue does not have, or gets in another way."""

_logger = logging.getLogger(__name__)


def add_to_call(
    request: ServedRequest, config: Any, num_prompt: int, model: Any, reach: Reach
) -> dict[str, list[Any]]:
    """Return the processors and criteria of a request by the names of `generate`'s arguments.

    A default length in `config`, the settings of its text, is lowered to the room that there is
    behind the tokens of its prompt; ValueError if there is none.
    """
    is_pair = model.config.is_encoder_decoder
    if config.max_new_tokens is None and not is_pair:  # of a `generation_config`
        asked = USUAL_LENGTH if config.max_length is None else config.max_length - num_prompt
        if asked < 1:
            why = f"max_length={config.max_length} leaves no room behind {num_prompt} tokens"
            raise ValueError(f"{why} of the prompt: ask for max_new_tokens")
        config.max_new_tokens, config.max_length = asked, None
    if reach.tokens is not None:
        room, asked = reach.tokens - num_prompt, config.max_new_tokens
        if room < 1 or (request.length is not None and asked is not None and asked > room):
            new = f" and {asked} new ones" if request.length is not None and room > 0 else ""
            raise ValueError(
                f"a prompt of {num_prompt} tokens{new} needs more than the {reach.tokens} that a "
                "text may have here: shorten it, or ask for fewer tokens"
            )
        config.max_new_tokens = None if asked is None else min(asked, room)
    num_prompt = 1 if is_pair else num_prompt
    own: dict[str, list[Any]] = {"logits_processor": [], "stopping_criteria": []}
    if request.presence_penalty:
        own["logits_processor"].append(PresencePenalty(request.presence_penalty, num_prompt))
    if request.grammar is not None:
        own["logits_processor"].append(request.grammar)
    if request.stop:
        own["stopping_criteria"].append(StopTexts(request.stop, reach.tokenizer, num_prompt))
    return {name: given for name, given in own.items() if given}


class Running:
    """Runs the requests for a server's model, together or one by one.

    It gives the server's `GenerationState` other methods.

    Attributes:
        reach: What the model can read, once it is loaded.
        readers: The threads in which requests are checked and divided into tokens.
        queue: Decodes requests together, None before the first one.
    """

    def __init__(
        self, state: Any, config: SpeculativeConfig, limits: Limits, together: bool
    ) -> None:
        self.config, self.limits, self._together = config, limits, together
        self._batching = getattr(state, compat.SERVERS_QUEUE_CONFIG)
        self.reach = Reach()
        self.queue: SpeculativeBatchingManager | None = None
        self._starting = threading.Lock()  # of the queue, which two threads may need at once
        self.readers = ThreadPoolExecutor(2, "lookahead_hf reading")
        self._trials = ThreadPoolExecutor(4, "lookahead_hf trying")  # schemas that are not known
        self._compilers = ThreadPoolExecutor(4, "lookahead_hf compiling")
        self._thread = ThreadPoolExecutor(1, "lookahead_hf generating")
        state.get_manager, state.use_continuous_batching = self.get_manager, self.uses_queue
        state.is_cb_alive = lambda: self.queue is None or self.queue.fatal_error is None

    def end(self) -> None:
        """End all threads; the requests were answered or given up."""
        if self.queue is not None:
            self.queue.stop(timeout=STOP_SECONDS, hard_stop=True)
        for each in (self._thread, self._trials, self._compilers, self.readers):
            each.shutdown(wait=False, cancel_futures=True)

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """Return what runs a request, as transformers' server sees it."""
        return Together(self) if use_cb else Alone(self, self._thread)

    def uses_queue(self, model: Any, modality: Any) -> bool:
        """Return whether the current request is decoded beside others, by our queue alone."""
        request = current.get() or ServedRequest()
        is_alone = request.is_alone or request.speculative not in (None, self.config)
        if self._together and not is_alone and modality.name == "LLM":
            with self._starting:
                if self.queue is None or self.queue.fatal_error is not None:
                    self._start_queue(model)
                if self.queue is not None:
                    return True
        if request.log_probs is not None:
            request.refusal = (
                "logprobs are served where requests are decoded together: leave them out, or "
                "prediction, speculative and beams"
            )
            raise ValueError(request.refusal)
        return False

    def _start_queue(self, model: Any) -> None:
        """Start a queue, unless requests have to be decoded one after the other."""
        self.queue = None
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = config.max_new_tokens or USUAL_LENGTH  # each request brings its own
        try:
            engine, _ = engine_of(model, self.config, BatchOptions(), config, self._batching)
        except (Unserved, ValueError) as error:
            _logger.warning("requests are decoded one after the other: %s", error)
            self._together = False
        else:
            engine.beside = self._thread.submit
            self.queue = SpeculativeBatchingManager(engine)
            self.queue.start()

    def compiling(
        self, request: ServedRequest, prompt: Any, work: Callable[[], object]
    ) -> Future[Any] | None:
        """Compile a request's grammar beside the decoding, then go on; None if it needs none."""
        task = task_of(request, prompt, self.reach.tokenizer)
        if task is None:
            return None

        def compile_first() -> None:
            try:
                if not request.is_cancelled:
                    given = self.reach.tokenizer, self.limits.compile_seconds
                    request.grammar = grammar_of(request, task, *given)
            except Exception as error:
                give_up(request, error)
            if not request.is_cancelled:
                work()

        return (self._compilers if trials.knows(task) else self._trials).submit(compile_first)


class Alone(GenerateManager):
    """Runs one request in the thread of all that are decoded by themselves."""

    def __init__(self, running: Running, thread: ThreadPoolExecutor) -> None:
        self._running, self._thread, self._prompt = running, thread, None

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._prompt = inputs["input_ids"]
        return super().generate_streaming(model, processor, inputs, *args, **kwargs)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in the thread, which can end, unlike transformers' own."""
        run = contextvars.copy_context().run
        work = partial(self._thread.submit, run, function, *args, **kwargs)
        request = current.get() or ServedRequest()
        return self._running.compiling(request, self._prompt, work) or work()

    async def async_submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = current.get() or ServedRequest()
        ready = self._running.compiling(request, kwargs.get("input_ids"), lambda: None)
        if ready is not None:
            await asyncio.wrap_future(ready)
        run = contextvars.copy_context().run
        return await asyncio.wrap_future(self._thread.submit(run, function, *args, **kwargs))


class Together(CBGenerateManager):
    """Runs one request in the queue."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running

    def init_cb(self, model: Any, gen_config: Any) -> None:
        setattr(self, compat.SERVERS_QUEUE, Adding(self._running, model, gen_config))


class Adding:
    """The queue as transformers' server sees it for the current request, with its settings."""

    def __init__(self, running: Running, model: Any, config: Any) -> None:
        assert running.queue is not None
        self._running, self._queue, self._model = running, running.queue, model
        self._config, self._request = config, current.get() or ServedRequest()
        self._tokenizer = running.reach.tokenizer
        self.background_thread_status = self._queue
        self.cancel_request = self._queue.cancel_request

    def add_request(self, input_ids: Any, request_id: str, **given: Any) -> str:
        """Add the request with its own settings, once its handler is there and its grammar."""
        # A stream's handler is registered after this.
        request = self._request
        request.generates = True
        request.when_over = partial(self.cancel_request, request_id)
        given |= {"request_id": request_id, "streaming": True, "group": request.group}
        work = partial(self._add, input_ids, given)
        compiling = self._running.compiling
        request.when_read = lambda: compiling(request, input_ids, work) or work()
        return request_id

    def _add(self, input_ids: Any, given: dict[str, Any]) -> None:
        request, config = self._request, self._config
        try:
            own: dict[str, Any] = add_to_call(
                request, config, len(input_ids), self._model, self._running.reach
            )
            usual = self._queue.generation_config.to_dict()
            settings = {
                name: value
                for name, value in config.to_dict().items()
                if name not in _OF_SERVER and value is not None and value != usual.get(name)
            }  # those of the text that are not the queue's
            if request.samples:
                settings["do_sample"] = True
            if request.log_probs is not None:
                settings |= {"top_logprobs": request.log_probs, "return_logprobs": True}
            given |= {"max_new_tokens": config.max_new_tokens, "seed": request.seed}
            if self._queue.add_request(input_ids, **given, **settings, **own) is None:
                request.end(STOPPING, 503)
            if request.is_cancelled:
                self.cancel_request(given["request_id"])
        except Exception as error:
            give_up(request, error)

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Register the handler of the request's outputs, of which it is told what it expects."""
        request, pieces = self._request, Pieces(self._tokenizer)

        def take(output: Any) -> None:
            if output.error is not None:
                raise output.exception or RuntimeError(output.error)
            request.has_begun = True
            if request.log_probs is not None:
                request.places += pieces.places(output, len(request.places))
            if output.is_finished():
                request.stats = output.speculative_stats
                if request.streams and request.tools is None:  # of which a whole call is read
                    tokens = output.generated_tokens
                    request.unfinished_end = unfinished_end(tokens, self._tokenizer)
            if request.streams or output.is_finished():
                callback(output)

        def hear(output: Any) -> None:
            try:
                take(output)
            except Exception as error:  # which the queue would not tell anybody
                give_up(request, error)

        self._queue.register_result_handler(request_id, hear)


def give_up(request: ServedRequest, error: BaseException) -> None:
    """End a request that has failed by its own mistake, such as a setting, or by the server's."""
    # torch says the latter where settings rule all tokens out.
    of_settings = "generation_config" in (request.body or ()) and "probability tensor" in str(error)
    if of_settings or isinstance(error, (ValueError, ArithmeticError)):
        request.end(str(error).strip().partition("\n")[0] or type(error).__name__)
    else:
        _logger.error("a request failed", exc_info=error)
        request.end(FAILED, 500)


class Cancelled(Exception):
    """Ends a generation whose client went away."""


class ServedGenerate:
    """Replaces `generate` of a served model, and applies the fields of the current request.

    The model gets enabled. `count` is called with the statistics of each call.
    """

    def __init__(
        self, model: Any, running: Running, count: Callable[[stats.SpeculativeStats], None]
    ) -> None:
        self._generate = lookahead_hf.enable(model, running.config).generate
        self._model, self._running = model, running
        lookahead_hf.on_stats(model, count)

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
        streamer, reach = kwargs.get("streamer"), self._running.reach
        of_model = self._model.generation_config
        beams = [getattr(each, "num_beams", None) for each in (config, of_model)]
        streams = not self._model.config.is_encoder_decoder and (beams[0] or beams[1] or 1) == 1
        if streams or streamer is not None:
            kwargs["streamer"] = _Watched(request, streamer, self._model, reach.tokenizer)
        try:
            check_media(request, kwargs)
            ids = kwargs.get("input_ids")
            if config is not None and ids is not None:
                added = add_to_call(request, config, ids.shape[-1], self._model, reach)
                for name, own in added.items():
                    kwargs[name] = [*(kwargs.get(name) or ()), *own]
            if "streamer" not in kwargs:  # such as beams, and sounds
                ends, given = ending(lambda: request.is_cancelled), kwargs.get("stopping_criteria")
                kwargs["stopping_criteria"] = [*(given or ()), ends]
            wish = getattr(of_model, "speculative", None)
            wishes = request.speculative, wish, self._running.config
            kwargs["speculative"] = next(each for each in wishes if each is not None)
            with noise.drawing(self._model.device, request.seed):
                output = self._generate(*args, **kwargs)
        except Cancelled:
            raise
        except Exception as error:
            give_up(request, error)
            raise
        request.stats = stats.of_this_thread(self._model)
        return output


class _Watched:
    """Wraps a request's streamer, or stands in for a missing one.

    It ends the generation with the request, and stores the statistics before the text's end.
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
        self._request.stats = stats.of_this_thread(self._model)
        if self._request.streams:
            self._request.unfinished_end = unfinished_end(self._tokens, self._tokenizer)
        if self._streamer is not None:
            self._streamer.end()

"""`generate_batch` and `init_continuous_batching` of an enabled model."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from transformers import ContinuousBatchingConfig
from transformers.utils.logging import tqdm

from lookahead_hf import fallback, stats
from lookahead_hf.call.arguments import wanted
from lookahead_hf.call.prepared import Request
from lookahead_hf.config import SpeculativeConfig, check_int
from lookahead_hf.model.compat.generation import GenerationOutput, WorkloadHints, bytes_per_token
from lookahead_hf.queue.manager import SpeculativeBatchingManager
from lookahead_hf.queue.request import OBJECTS, RequestBuilder, request_state, text_ids
from lookahead_hf.queue.scheduler import Engine
from lookahead_hf.queue.session import decode
from lookahead_hf.verification.noise import fresh_seed

_logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 16
"""Texts that are decoded together by default, if there is room for their K and V. On two cores, 24
mixed prompts took 0.79 of the time of 4 slots, and 0.93 of that of 8 (SmolLM2-135M, bfloat16)."""

LEAST_ROOM = 1 << 30
"""Most bytes of K and V in the default slots; larger weights allow as many bytes as they have."""

MOST_SLOTS = 4096  # The upper limit of `max_slots`


@dataclass(frozen=True)
class BatchOptions:
    """The options of a call beside transformers' own arguments."""

    speculative: Any = None  # what `speculative=` of `generate` takes
    max_slots: int | None = None  # most texts that are decoded together
    tokenizer: Any = None  # what `stop_strings` and a pool's fingerprint need


OWN = tuple(each.name for each in fields(BatchOptions))
"""Arguments of a call that transformers does not know."""

INSTEAD = {
    **dict.fromkeys((*OBJECTS, "streamer"), "call add_request of a manager"),
    "assistant_model": "leave it out, or call generate",
    "seed": "give each request a seed, or pass ContinuousBatchingConfig(seed=...)",
}
"""Arguments of `generate` that `generate_batch` ignores, and what to do instead."""

ELSEWHERE = {
    **dict.fromkeys(("prediction", "trace"), "leave it out, or call generate, which has it"),
    "max_batch_tokens": "pass ContinuousBatchingConfig(max_batch_tokens=...)",
}
"""Further names that a misspelt one may mean, and what to do instead."""

_asked: ContextVar[BatchOptions | None] = ContextVar("lookahead_hf_asked", default=None)
"""Options of the call in progress, for the methods that it calls."""


@contextmanager
def asking(asked: BatchOptions) -> Iterator[None]:
    """Give options to the methods of continuous batching that are called inside."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def run_paged(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a `generate` with cache_implementation="paged", which calls `generate_batch`."""
    with asking(BatchOptions(kwargs.pop("speculative", None))):
        return original(*args, **kwargs)


def call(
    model: Any, original: Any, default: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `generate_batch` or `init_continuous_batching`, speculatively if that is asked for."""
    own = BatchOptions(**{name: kwargs.pop(name) for name in OWN if name in kwargs})
    outer = _asked.get()
    asked = outer if own == BatchOptions() and outer is not None else own
    theirs = {*inspect.signature(original).parameters, "max_new_tokens"}
    settings = model.generation_config, ContinuousBatchingConfig()
    for name in kwargs.keys() - theirs:  # `generate_batch` ignores them
        if not any(hasattr(each, name) for each in settings):
            _check_name(original.__name__, name, theirs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    generation_config = given.get("generation_config")
    config = wanted(asked.speculative, (generation_config, model.generation_config), default)[1]
    run = _manager if original.__name__ == "init_continuous_batching" else _batch
    if run is _batch and asked.speculative not in (None, False):
        for name, fix in INSTEAD.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"generate_batch has no argument {name!r}: {fix}")
    if config is not None:
        try:
            return run(model, config, asked, **given)
        except fallback.Unserved as unserved:
            fallback.report(model, unserved, config.on_fallback, "transformers' manager")
            record = stats.SpeculativeStats(fallback_reason=unserved.reason)
            stats.publish(model, record)
            stats.notify(model, record)
    if any(isinstance(each, Mapping) for each in given.get("inputs") or ()):
        raise ValueError(
            "transformers' manager, which writes these texts, knows no requests with settings of "
            "their own: pass speculative= or change the run, or give token ids alone"
        )
    with asking(BatchOptions(speculative=False)):
        return original(*args, **kwargs)


def _check_name(function: str, name: str, theirs: set[str]) -> None:
    """Raise ValueError if an unknown argument resembles one of this library's, not of `theirs`."""
    options = [each.name for each in fields(SpeculativeConfig)]
    known = {*OWN, *options, *theirs, *ELSEWHERE}
    meant = next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.7)), None)
    if meant is None or meant in theirs:
        return
    fix = ELSEWHERE.get(meant, f"did you mean {meant}=?")
    if meant in options:
        fix = ELSEWHERE.get(meant, f"pass speculative=SpeculativeConfig({meant}=...)")
    raise ValueError(f"{function} has no argument {name!r}: {fix}")


def _manager(*args: Any, **given: Any) -> SpeculativeBatchingManager:
    """Return our manager, or raise Unserved, or ValueError for wrong arguments."""
    engine, batching = engine_of(*args, **given)
    return SpeculativeBatchingManager(engine, batching.max_queue_size, batching)


def _batch(
    model: Any,
    config: SpeculativeConfig,
    asked: BatchOptions,
    /,
    inputs: Sequence[Any],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    max_new_tokens: int | None = None,
    **ignored: Any,
) -> dict[str, GenerationOutput]:
    """Decode prompts, or requests with settings of their own, in the caller's thread.

    The `inputs` are token ids of each prompt, or the arguments of `add_request` by their names.
    Unserved if this run is transformers' own, ValueError for wrong arguments.
    """
    requests = [each if isinstance(each, Mapping) else {"input_ids": each} for each in inputs]
    if not requests:
        return {}
    if not all(hasattr(each.get("input_ids"), "__len__") for each in requests):
        raise ValueError("a request has no list of token ids: give one for each prompt")
    settings = generation_config or model.generation_config
    most_new = max_new_tokens or settings.max_new_tokens or 0
    for each in requests:
        check_int("max_new_tokens", each.get("max_new_tokens") or most_new, 0, 2**40)
    siblings = settings.num_return_sequences or 1
    hints = WorkloadHints(
        max_prompt_length=max(len(each["input_ids"]) for each in requests),
        max_generated_length=max(each.get("max_new_tokens") or most_new for each in requests),
        num_requests=len(requests) * siblings,
    )
    engine, _ = engine_of(
        model, config, asked, generation_config, continuous_batching_config, hints
    )
    ids, usual = [], {"max_new_tokens": max_new_tokens, "record_timestamps": record_timestamps}
    for number, each in enumerate(requests):
        own = {"request_id": f"req_{number}", **usual, **each}
        group = own.pop("group", None)
        state = request_state(num_children=siblings - 1, **own)
        ids += text_ids(state)
        engine.add(state, group)
    if len({*ids}) < len(ids):
        raise ValueError("two requests have the same request_id: leave it out, or give others")
    found = dict[str, GenerationOutput]()
    with tqdm(total=len(ids), unit="request", disable=not progress_bar) as bar:

        def keep(output: GenerationOutput) -> bool:
            found[output.request_id] = output
            bar.update(output.is_finished())
            return True

        engine.hand_out = keep
        try:
            decode(engine)
        except Exception as fatal:  # of the model: texts that were finished are returned
            _logger.exception("the run was ended by an exception")
            engine.fail_waiting(fatal)
    records = [each.speculative_stats for each in found.values() if each.speculative_stats]
    if records:
        stats.publish(model, functools.reduce(stats.joined, records))
    return {name: found[name] for name in ids}


def engine_of(
    model: Any,
    config: SpeculativeConfig,
    asked: BatchOptions,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> tuple[Engine, ContinuousBatchingConfig]:
    """Return an engine, and transformers' settings of continuous batching.

    `generation_config` has the settings of requests that do not say otherwise; `workload_hints`
    are of all requests, None if any number may come. Unserved if the run cannot be served,
    ValueError for wrong arguments.
    """
    generation = copy.deepcopy(generation_config or model.generation_config)
    # transformers, too, looks into the generation config, though it warns of that.
    batching = continuous_batching_config or getattr(generation, "continuous_batching_config", None)
    if not isinstance(batching, ContinuousBatchingConfig):
        batching = ContinuousBatchingConfig()
    if batching.cpu_offload_space:
        detail = f"cpu_offload_space={batching.cpu_offload_space!r}"
        reason = fallback.FallbackReason.CONTINUOUS_BATCHING
        raise fallback.Unserved(reason, detail, "leave it out")
    # The cache of `generate` is another one: transformers' server, for one, switches it off.
    generation.cache_implementation, generation.use_cache = None, True
    slots = batching.max_requests_per_batch if asked.max_slots is None else asked.max_slots
    slots = default_slots(model, workload_hints) if slots is None else slots
    check_int("max_slots", slots, 1, MOST_SLOTS)
    most = batching.max_batch_tokens
    if most is not None:
        check_int("max_batch_tokens", most, 1, 2**40)
        slots = min(slots, most)
    request = Request(config, tokenizer=asked.tokenizer)
    builder = RequestBuilder(model.eval(), generation, request, batching.return_logprobs)
    builder.check()
    seed = fresh_seed() if batching.seed is None else batching.seed
    return Engine(builder, slots, most, seed), batching


def default_slots(model: Any, hints: Any) -> int:
    """Return how many texts to decode together if the caller does not say.

    `hints` are transformers' `WorkloadHints` of the requests, None if it knows nothing.
    """
    max_tokens = max(LEAST_ROOM, model.get_memory_footprint()) // bytes_per_token(model)
    longest = 1 if hints is None else hints.max_prompt_length + hints.max_generated_length
    num_requests = getattr(hints, "num_requests", None) or DEFAULT_SLOTS
    return max(1, min(DEFAULT_SLOTS, num_requests, max_tokens // max(1, longest)))

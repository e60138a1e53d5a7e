"""`generate_batch` and `init_continuous_batching` of an enabled model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from lookahead_hf import fallback
from lookahead_hf.batching.manager import Limits, SpeculativeBatchingManager
from lookahead_hf.batching.request import Maker
from lookahead_hf.config import SpeculativeConfig, check_int
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.generation.options import Request

SLOTS_ON_CPU, SLOTS_ON_DEVICE = 8, 32
"""Texts that are decoded together where nobody says how many."""

NAMES = ("generate_batch", "init_continuous_batching")
"""The methods of a model that speculate in continuous batching."""


@dataclass(frozen=True)
class Asked:
    """What a call asks beside transformers' own arguments.

    Attributes:
        speculative: As in `generate`; None where the call does not say.
        max_slots: Most texts that are decoded together.
        max_tokens: Most tokens of all of them.
    """

    speculative: Any = None
    max_slots: int | None = None
    max_tokens: int | None = None


_asked: ContextVar[Asked | None] = ContextVar("lookahead_hf_asked", default=None)
"""What the call in progress asks, for the methods that it calls in turn."""


@contextmanager
def asking(asked: Asked) -> Iterator[None]:
    """Let the methods of continuous batching that are called inside know what is asked."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


class BatchMethod:
    """Stands for one of `NAMES` on a model object; a copy of the model has one of its own."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method of the model's class; `inspect` follows it."""
        method: Callable[..., Any] = getattr(type(self._model), self._name).__get__(self._model)
        return method

    @property
    def __name__(self) -> str:
        return self._name

    def __call__(
        self,
        *args: Any,
        speculative: Any = None,
        max_slots: int | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the method, speculatively if that is asked for; see docs/howto/generate_batch.md."""
        outer, asked = _asked.get(), Asked(speculative, max_slots, max_tokens)
        asked = asked if outer is None or asked != Asked() else outer
        if self._name == "init_continuous_batching":
            return _manager(self._model, self.__wrapped__, asked, *args, **kwargs)
        with asking(asked):
            return self.__wrapped__(*args, **kwargs)


def _manager(
    model: Any,
    original: Callable[..., Any],
    asked: Asked,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Make a manager: ours if speculation is asked for and can be served, else transformers'."""
    given = generation_config, continuous_batching_config, workload_hints
    default = vars(model)["generate"].default
    config = SpeculativeConfig.resolve(default if asked.speculative is None else asked.speculative)
    if config is None:
        return original(*given)
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(kept, SpeculativeBatchingManager):
        return kept
    try:
        return _ours(model, config, asked, *given)
    except Unserved as unserved:
        fallback.report(model, unserved, config.on_fallback)
        return original(*given)


def _ours(
    model: Any,
    config: SpeculativeConfig,
    asked: Asked,
    generation_config: Any,
    batching_config: Any,
    hints: Any,
) -> SpeculativeBatchingManager:
    batching = batching_config or ContinuousBatchingConfig()
    generation = copy.deepcopy(generation_config or model.generation_config)
    if batching.return_logprobs:
        raise _unserved("return_logprobs=True")
    if batching.cpu_offload_space:
        raise _unserved(f"cpu_offload_space={batching.cpu_offload_space!r}")
    if generation.cache_implementation == "paged":
        generation.cache_implementation = None
    fallback.check_settings(lambda name: _setting(generation, name))
    slots = asked.max_slots or batching.max_requests_per_batch
    if slots is None:
        slots = SLOTS_ON_CPU if model.device.type == "cpu" else SLOTS_ON_DEVICE
        slots = max(1, min(slots, getattr(hints, "num_requests", None) or slots))
    check_int("max_slots", slots, 1, 4096)
    tokens = asked.max_tokens
    if tokens is None and batching.num_blocks is not None:
        tokens = batching.num_blocks * batching.page_size
    seed = batching.seed
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    room = None if tokens is None else tokens // slots
    maker = Maker(model.eval(), generation, Request(config), room)
    maker.check()
    return SpeculativeBatchingManager(maker, Limits(slots, batching.max_queue_size, seed))


def _setting(generation: Any, name: str) -> Any:
    value = getattr(generation, name, None)
    return True if name == "use_cache" and value is None else value


def _unserved(what: str) -> Unserved:
    return Unserved(FallbackReason.CONTINUOUS_BATCHING, what, "leave it out")

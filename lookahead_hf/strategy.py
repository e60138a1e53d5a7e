"""One call of `generate`: whether it is speculated, and how it is handed to our decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from transformers.utils import ModelOutput

from lookahead_hf import activations, fallback, stats
from lookahead_hf.arguments import OURS, Arguments, HeldStreamer
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.decoding import Request, decode
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.target import admission

ASSISTANT_SETTINGS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
"""Generation settings of transformers that say how an assistant is to draft."""

_decided: ContextVar[bool] = ContextVar("lookahead_hf_decided", default=False)
"""Whether this is inside a call for which was decided already: a model whose `generate` calls
`generate` again, our own fallback. What a caller's processor calls while we decode is not."""


def run(
    model: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    default: Any = None,
    by_name: bool = False,
) -> Any:
    """Generate speculatively where that was asked for, else call `original` with what was given.

    Args:
        model: The model that generates.
        original: Its `generate` as it would be without us, bound.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        default: What decides where neither the call nor a generation config does.
        by_name: Whether a function of ours was called, not a model's `generate`.
    """
    is_inner = _decided.get() and not by_name and "speculative" not in kwargs
    if is_inner or isinstance(kwargs.get("custom_generate"), Strategy):
        return original(*args, **_without(kwargs, OURS[1:]))
    plain = _without(kwargs, {*OURS} - {"prediction"})
    try:
        arguments = Arguments(model, original, args, kwargs)
    except TypeError:
        return original(*args, **plain)  # which says what is wrong with the call
    value, config = arguments.wanted(default)
    if value is None:
        return _plainly(model, original, args, plain)
    plain.pop("prediction", None)
    token = _decided.set(True)
    try:
        if config is None:
            return _plainly(model, original, args, plain)
        arguments.check_conflicts(value)
        return _serve(model, original, arguments, config, lambda: original(*args, **plain))
    finally:
        _decided.reset(token)


def _without(kwargs: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


def _plainly(
    model: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    stats.publish(model, None)  # before the call, which may speculate within
    return original(*args, **kwargs)


def _serve(
    model: Any,
    original: Callable[..., Any],
    arguments: Arguments,
    config: SpeculativeConfig,
    plain: Callable[[], Any],
) -> Any:
    """Let the original prepare the call and decode it ourselves, or else run `plain`."""
    try:
        strategy = Strategy(model, _request(model, arguments, config))
        output = original(**arguments.forwarded(strategy, strategy.held))
        if strategy.decoded is not None:
            activations.say_once(strategy.decoded, stacklevel=4)
            if strategy.decoded is not model:
                stats.publish(model, stats.last_stats(strategy.decoded))
            if isinstance(output, ModelOutput):  # put together from those of several decodings
                output.speculative_stats = strategy.record
            return output
        # The original decoded by itself: with the streamer and all, but plainly.
        unserved = Unserved(FallbackReason.OWN_GENERATE, f"{type(model).__name__}.generate")
        return _fall_back(model, config, unserved, lambda: output)
    except Unserved as error:
        unserved = error.with_traceback(None)
    return _fall_back(model, config, unserved, plain)


def _request(model: Any, arguments: Arguments, config: SpeculativeConfig) -> Request:
    """What decoding is told of the call; raises Unserved where it cannot be speculated."""
    given, prediction = arguments.given, arguments.prediction()
    fallback.check_settings(arguments.setting)
    admission.check_setup(model)
    arguments.check_original()
    return Request(
        config=config,
        streamer=given.get("streamer"),
        tokenizer=arguments.tokenizer,
        assistant_model=given.get("assistant_model"),
        assistant_tokenizer=given.get("assistant_tokenizer"),
        assistant_settings={name: arguments.setting(name) for name in ASSISTANT_SETTINGS},
        synced_gpus=arguments.synced_gpus(),
        prediction=prediction,
    )


def _fall_back(
    model: Any, config: SpeculativeConfig, unserved: Unserved, plain: Callable[[], Any]
) -> Any:
    # Between here and the caller of generate stand _serve, run and the hook.
    fallback.report(model, unserved, config.on_fallback, stacklevel=5)
    output = plain()
    record = SpeculativeStats(fallback_reason=unserved.reason)
    stats.publish(model, record)
    if isinstance(output, ModelOutput):
        output.speculative_stats = record
    return output


class Strategy:
    """What `generate` gets as `custom_generate`: decodes the call that it prepared.

    Attributes:
        held: What stands in for the caller's streamer until decoding takes over, None without one.
        decoded: The model that was decoded, None before.
        record: What all decodings so far did, None before.
    """

    def __init__(self, model: Any, request: Request) -> None:
        self._model = model
        self._request = request
        self.held = None if request.streamer is None else HeldStreamer(request.streamer)
        self.decoded: Any = None
        self.record: SpeculativeStats | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; `generate` passes `inputs_tensor`, what it was given as inputs, by its name."""
        fallback.check_settings(lambda name: getattr(generation_config, name, None))
        if model is not self._model:
            admission.check_setup(model)
        if self.held is not None:
            self.held.take()
        prepared = logits_processor, stopping_criteria, generation_config, model_kwargs
        token = _decided.set(False)
        try:
            output = decode(model, input_ids, *prepared, self._request_with(model, inputs_tensor))
        except Unserved as unserved:
            if self.decoded is None:
                raise
            # What was decoded before stands: only what is left to decode can run plainly.
            fallback.report(model, unserved, self._request.config.on_fallback)
            return self._sample(model, input_ids, *prepared)
        finally:
            _decided.reset(token)
        self.decoded = model
        self._add(model)
        return output

    def _sample(
        self,
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Decode as plain `generate` does with what it prepared."""
        if self.held is not None:
            self.held.put(input_ids.cpu())  # which was put already, and dropped by us
        return model._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=self._request.synced_gpus,
            streamer=self.held,
            **model_kwargs,
        )

    def _add(self, model: Any) -> None:
        """Let the model's latest record be of all that the call has decoded with it."""
        latest = stats.last_stats(model)
        if self.record is not None and latest is not None:
            latest = stats.joined(self.record, latest)
            stats.publish(model, latest)
        self.record = latest

    def _request_with(self, model: Any, inputs: torch.Tensor | None) -> Request:
        """The request and, where the model has an encoder, what that was given, [texts, ...]."""
        if not model.config.is_encoder_decoder or inputs is None:
            return self._request
        if not inputs.is_floating_point() and bool((inputs < 0).any()):
            return self._request  # made up by `generate` where it was given the encoder's outputs
        return dataclasses.replace(self._request, encoder_inputs=inputs)

"""Decides whether a call of `generate` is speculated, and passes it to our decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from transformers.utils import ModelOutput

from lookahead_hf import fallback, stats
from lookahead_hf.call import admission
from lookahead_hf.call.admission import Purpose
from lookahead_hf.call.arguments import OURS, GenerateArguments
from lookahead_hf.call.emitter import HeldStreamer
from lookahead_hf.call.prepared import PreparedCall, Request
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import Unserved
from lookahead_hf.generation.decode import decode
from lookahead_hf.model import compat
from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.trace import Trace

ASSISTANT_SETTINGS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
"""transformers' generation settings for how an assistant drafts."""

_decided: ContextVar[tuple[Any, ...]] = ContextVar("lookahead_hf_decided", default=())
"""Models whose calls are in progress. It is already decided whether they and their submodules
speculate: a model's `generate` may call `generate` again, and so does our fallback. Calls that a
caller's processor makes while we decode are decided separately."""


def run(
    model: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    default: Any = None,
    by_name: bool = False,
) -> Any:
    """Generate speculatively if the call asks for that, else call `original` with its arguments.

    `original` is the model's `generate` as it would be without speculation, bound. `default`
    decides if neither the call nor a generation config does; `by_name` says that our own function
    was called, not a model's `generate`.
    """
    is_inner = "speculative" not in kwargs and not by_name and _is_decided(model, kwargs)
    if is_inner or isinstance(kwargs.get("custom_generate"), Strategy):
        return original(*args, **_without(kwargs, OURS[1:]))
    plain = _without(kwargs, {*OURS} - {"prediction"})
    try:
        arguments = GenerateArguments(model, original, args, kwargs)
    except TypeError:
        return original(*args, **plain)  # raises an error that explains what is wrong
    value, config = arguments.wanted(default)
    if value is None:
        return _plainly(model, original, args, plain)
    plain.pop("prediction", None)
    token = _decided.set((*_decided.get(), model))
    try:
        if config is None:
            return _plainly(model, original, args, plain)
        is_default = not by_name and arguments.wanted()[0] is None
        try:
            arguments.check_conflicts(value, is_default)
        except Unserved as error:
            return _fall_back(model, config, error, lambda: original(*args, **plain))
        if arguments.setting("use_mtp"):
            plain["use_mtp"] = False  # transformers drafts so for one row only
        return _serve(model, original, arguments, config, lambda: original(*args, **plain))
    finally:
        _decided.reset(token)


def _is_decided(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the call is part of another one, or an assistant's."""
    if getattr(kwargs.get("generation_config"), "is_assistant", False):
        return True  # transformers lets it draft a few tokens
    outer = _decided.get()
    return any(part is model for each in outer for part in each.modules())


def _without(kwargs: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


def _plainly(
    model: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    stats.publish(model, None)  # before the call, within which others may speculate
    return original(*args, **kwargs)


def _serve(
    model: Any,
    original: Callable[..., Any],
    arguments: GenerateArguments,
    config: SpeculativeConfig,
    plain: Callable[[], Any],
) -> Any:
    """Let the original prepare the call and decode it by our strategy, or else run `plain`."""
    try:
        strategy = Strategy(model, _request(model, arguments, config), arguments.decodes_itself())
        output = original(**arguments.forwarded(strategy, strategy.held))
    except Unserved as error:
        unserved = error.with_traceback(None)
    else:
        if strategy.decoded is not None:
            if strategy.decoded is not model:
                stats.publish(model, strategy.record)
        elif strategy.record is None:
            return _fall_back(model, config, strategy.if_left_out, lambda: output)
        else:
            stats.publish(model, strategy.record)  # again: see `_fall_back`
        return _attach_stats(model, output, strategy.record)
    return _fall_back(model, config, unserved, plain)


def _request(model: Any, arguments: GenerateArguments, config: SpeculativeConfig) -> Request:
    """Return the request of a call, checked as far as that costs nothing before an encoder runs.

    Unserved if it cannot be speculated, ValueError if the prediction is wrong.
    """
    given, prediction = arguments.given, arguments.prediction()
    fallback.check_settings(arguments.setting)
    admission.admit(model, Purpose.CALL, compat.given_cache(given))
    arguments.check_original()
    return Request(
        config=config,
        streamer=given.get("streamer"),
        tokenizer=arguments.tokenizer,
        assistant_model=given.get("assistant_model"),
        assistant_tokenizer=given.get("assistant_tokenizer"),
        use_mtp=bool(arguments.setting("use_mtp")),
        assistant_settings=compat.without_defaults(
            {name: arguments.setting(name) for name in ASSISTANT_SETTINGS}
        ),
        synced_gpus=compat.synced_gpus(model, given.get("synced_gpus")),
        prediction=prediction,
    )


def _fall_back(
    model: Any, config: SpeculativeConfig, unserved: Unserved, plain: Callable[[], Any]
) -> Any:
    fallback.report(model, unserved, config.on_fallback)
    record = _plain_record(config, unserved)
    stats.publish(model, record)  # before the text, at whose end a reader may ask for it
    output = plain()
    stats.publish(model, record)  # again: a processor may have called the model meanwhile
    return _attach_stats(model, output, record)


def _plain_record(config: SpeculativeConfig, unserved: Unserved) -> SpeculativeStats:
    trace = Trace(fallback_reason=str(unserved.reason)) if config.trace else None
    return SpeculativeStats(fallback_reason=unserved.reason, trace=trace)


def _attach_stats(model: Any, output: Any, record: SpeculativeStats | None) -> Any:
    if record is not None:
        stats.notify(model, record)
    if isinstance(output, ModelOutput):
        output.speculative_stats = record
    return output


class Strategy:
    """The `custom_generate` of a call: decodes the call that transformers has prepared.

    Attributes:
        held: Replaces the caller's streamer until decoding takes over, None without a streamer.
        decoded: The model that was decoded, None before.
        record: Statistics of all decodings so far, None before the first.
        if_left_out: Why nothing is speculated if `generate` never calls the strategy.
    """

    def __init__(self, model: Any, request: Request, if_left_out: Unserved) -> None:
        self._model = model
        self._request = request
        self.if_left_out = if_left_out
        self.held: HeldStreamer | None = None
        if request.streamer is not None:
            self.held = HeldStreamer(request.streamer, self._before_foreign_text)
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
        """Decode a call; `inputs_tensor` is what `generate` was given as inputs."""
        is_admitted = model is self._model and not compat.has_own_generate(model)
        if not is_admitted:
            fallback.check_settings(lambda name: getattr(generation_config, name, None))
        call = PreparedCall(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            compat.forwarded(model, input_ids, model_kwargs),
            self._request_with(model, inputs_tensor),
        )
        if self.held is not None:
            self.held.drop()
        token = _decided.set(())
        try:
            if not is_admitted:
                admission.admit(model, Purpose.PART)
            output = decode(call)
        except Unserved as error:
            if self.decoded is None and self._request.assistant_model is not None:
                raise  # plain `generate` drafts with the assistant
            unserved = error.with_traceback(None)
        else:
            self.decoded = model
            self._add(model)
            return output
        finally:
            _decided.reset(token)
        return self._decode_plainly(call, unserved)

    def _before_foreign_text(self) -> None:
        """Report the fallback when a token comes that our decoding has not emitted."""
        if self.decoded is None:
            fallback.report(self._model, self.if_left_out, self._request.config.on_fallback)
            record = _plain_record(self._request.config, self.if_left_out)
            stats.publish(self._model, record)

    def _decode_plainly(self, call: PreparedCall, unserved: Unserved) -> Any:
        """Decode as plain `generate` does from the prepared call, such as from encoder outputs."""
        model, request = call.model, call.request
        fallback.report(model, unserved, request.config.on_fallback)
        if self.decoded is None:
            self.record = _plain_record(request.config, unserved)
            for each in {id(each): each for each in (model, self._model)}.values():
                stats.publish(each, self.record)  # before the text, as in any fallback
        if request.streamer is not None:
            request.streamer.put(call.input_ids.cpu())  # `held` has dropped the prompt
        return compat.run_loop(
            model,
            call.input_ids,
            logits_processor=call.processors,
            stopping_criteria=call.criteria,
            generation_config=call.generation_config,
            synced_gpus=request.synced_gpus,
            streamer=request.streamer,
            **call.model_kwargs,
        )

    def _add(self, model: Any) -> None:
        latest = stats.of_this_thread(model)
        if self.record is not None and latest is not None:
            latest = stats.joined(self.record, latest)
            stats.publish(model, latest)
        self.record = latest

    def _request_with(self, model: Any, inputs: torch.Tensor | None) -> Request:
        if not model.config.is_encoder_decoder or inputs is None:
            return self._request
        if not inputs.is_floating_point() and bool((inputs < 0).any()):
            return self._request  # `generate` made them up, as it was given the encoder's outputs
        return dataclasses.replace(self._request, encoder_inputs=inputs)

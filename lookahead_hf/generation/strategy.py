"""One call of `generate`: whether it is speculated, and how it is handed to our decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from transformers.utils import ModelOutput

from lookahead_hf import compat, fallback, quantization, stats
from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.fallback import Unserved
from lookahead_hf.generation.decode import decode
from lookahead_hf.generation.options import OURS, Arguments, HeldStreamer
from lookahead_hf.generation.request import Request, sources
from lookahead_hf.runner import support
from lookahead_hf.stats import SpeculativeStats

ASSISTANT_SETTINGS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
"""Generation settings of transformers that say how an assistant is to draft."""

_decided: ContextVar[tuple[Any, ...]] = ContextVar("lookahead_hf_decided", default=())
"""Models of whose calls this is inside: for them and their parts was decided already, as for a
model whose `generate` calls `generate` again, or our own fallback. What a caller's processor calls
while we decode is no such call."""


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
    is_inner = "speculative" not in kwargs and not by_name and _is_decided(model, kwargs)
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
    token = _decided.set((*_decided.get(), model))
    try:
        if config is None:
            return _plainly(model, original, args, plain)
        arguments.check_conflicts(value)
        return _serve(model, original, arguments, config, lambda: original(*args, **plain))
    finally:
        _decided.reset(token)


def _is_decided(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether nothing is to be decided: the call is part of another one, or of an assistant's."""
    if getattr(kwargs.get("generation_config"), "is_assistant", False):
        return True  # the few tokens that transformers lets it draft
    outer = _decided.get()
    return any(part is model for each in outer for part in each.modules())


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
        strategy = Strategy(model, _request(model, arguments, config), arguments.decodes_itself())
        output = original(**arguments.forwarded(strategy, strategy.held))
    except Unserved as error:
        unserved = error.with_traceback(None)
    else:
        if strategy.decoded is not None:
            quantization.say_once(strategy.decoded, stacklevel=4)
            if strategy.decoded is not model:
                stats.publish(model, stats.last_stats(strategy.decoded))
        elif strategy.record is None:
            return _fall_back(model, config, strategy.if_left_out, lambda: output)
        else:
            stats.publish(model, strategy.record)  # again: see `_fall_back`
        return _signed(output, strategy.record)
    return _fall_back(model, config, unserved, plain)


def _request(model: Any, arguments: Arguments, config: SpeculativeConfig) -> Request:
    """What decoding is told of the call, and all that can be said of it before an encoder runs.

    Raises:
        Unserved: It cannot be speculated.
        ValueError: An option, a pool or a prediction is wrong.
    """
    given, prediction = arguments.given, arguments.prediction()
    fallback.check_settings(arguments.setting)
    support.check_setup(model)
    arguments.check_original()
    if not compat.has_own_generate(model):  # which may hand the call to a part of the model
        support.check_kind(model)
        if given.get("past_key_values") is not None:
            shows = arguments.setting("return_dict_in_generate")
            shows = bool(shows and arguments.setting("output_attentions"))
            support.check_cache(model, given["past_key_values"], shows)
    request = Request(
        config=config,
        streamer=given.get("streamer"),
        tokenizer=arguments.tokenizer,
        assistant_model=given.get("assistant_model"),
        assistant_tokenizer=given.get("assistant_tokenizer"),
        assistant_settings={name: arguments.setting(name) for name in ASSISTANT_SETTINGS},
        synced_gpus=arguments.synced_gpus(),
        prediction=prediction,
    )
    if compat.encodes(model):
        num_rows = None if compat.has_own_generate(model) else arguments.num_rows
        sources(model, request, num_rows, bool(arguments.setting("do_sample")))
    return request


def _fall_back(
    model: Any, config: SpeculativeConfig, unserved: Unserved, plain: Callable[[], Any]
) -> Any:
    fallback.report(model, unserved, config.on_fallback)
    record = SpeculativeStats(fallback_reason=unserved.reason)
    stats.publish(model, record)  # before the text, at whose end a reader may look for it
    output = plain()
    stats.publish(model, record)  # again: a processor may have called the model meanwhile
    return _signed(output, record)


def _signed(output: Any, record: SpeculativeStats | None) -> Any:
    """The output with a record; it may be put together from those of several decodings."""
    if isinstance(output, ModelOutput):
        output.speculative_stats = record
    return output


class Strategy:
    """What `generate` gets as `custom_generate`: decodes the call that it prepared.

    Attributes:
        held: What stands in for the caller's streamer until decoding takes over, None without one.
        decoded: The model that was decoded, None before.
        record: What all decodings so far did, None before.
        if_left_out: Why nothing is speculated where nobody ever calls this.
    """

    def __init__(self, model: Any, request: Request, if_left_out: Unserved) -> None:
        self._model = model
        self._request = request
        self.if_left_out = if_left_out
        self.held: HeldStreamer | None = None
        if request.streamer is not None:
            self.held = HeldStreamer(request.streamer, self._before_others_text)
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
        if self.held is not None:
            self.held.take()
        prepared = logits_processor, stopping_criteria, generation_config, model_kwargs
        token = _decided.set(())
        try:
            if model is not self._model:
                support.check_setup(model)
            output = decode(model, input_ids, *prepared, self._request_with(model, inputs_tensor))
        except Unserved as error:
            if self.decoded is None and self._request.assistant_model is not None:
                raise  # plain `generate` drafts with it
            unserved = error.with_traceback(None)
        else:
            self.decoded = model
            self._add(model)
            return output
        finally:
            _decided.reset(token)
        return self._decode_plainly(unserved, model, input_ids, *prepared)

    def _before_others_text(self) -> None:
        """A token comes that we have not written."""
        if self.decoded is None:
            fallback.report(self._model, self.if_left_out, self._request.config.on_fallback)
            record = SpeculativeStats(fallback_reason=self.if_left_out.reason)
            stats.publish(self._model, record)

    def _decode_plainly(
        self,
        unserved: Unserved,
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Go on as plain `generate` does from what it has prepared, an encoder's outputs too."""
        fallback.report(model, unserved, self._request.config.on_fallback)
        if self.decoded is None:
            self.record = SpeculativeStats(fallback_reason=unserved.reason)
            for each in {id(each): each for each in (model, self._model)}.values():
                stats.publish(each, self.record)  # before the text, as in any fallback
        if self._request.streamer is not None:
            self._request.streamer.put(input_ids.cpu())  # which was put already, and dropped by us
        return model._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=self._request.synced_gpus,
            streamer=self._request.streamer,
            **model_kwargs,
        )

    def _add(self, model: Any) -> None:
        """Let the model's latest record be of all that the call has decoded with it."""
        latest = stats.last_stats(model)
        if self.record is not None and self.record.fallback_reason:
            self.record = None
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

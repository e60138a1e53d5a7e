"""Decides before the prompt is run whether a model, its cache and a call can be served."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import torch

from lookahead_hf.cache import hf_layers
from lookahead_hf.call import optional
from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.model import compat, self_test
from lookahead_hf.model.facts import facts_of, read
from lookahead_hf.model.state import state_of
from lookahead_hf.runner import attention, watch
from lookahead_hf.runner.attention import SERVED
from lookahead_hf.runner.processes import coordinator
from lookahead_hf.utils import warn_caller

MASK_KINDS = frozenset(
    {"full_attention", "indexed_attention", "sliding_attention", "chunked_attention"}
)

UNSERVED_TYPES = frozenset({"bloom", "deepseek_v4", "minimax", "mpt", "rwkv", "xlstm"})
"""Model types in which more than position ids and a mask decides what a token sees, and how."""

ENCODER_DECODERS = frozenset(
    {"bart", "blenderbot", "blenderbot-small", "florence2", "longt5", "m2m_100", "marian", "mbart"}
    | {"moonshine", "mt5", "pegasus", "plbart", "t5", "t5gemma", "umt5", "whisper"}
)
"""Types whose decoder positions we know: by a table, by distances, or by position ids."""

DECODERS_OF_PAIRS = frozenset({"bert", "bert-generation", "gpt2", "mbart", "trocr"})
"""The same for the second model of an `EncoderDecoderModel` or `VisionEncoderDecoderModel`."""

_MODEL, _CACHE, _ARGUMENT = FallbackReason.MODEL, FallbackReason.CACHE, FallbackReason.ARGUMENT
_STATEFUL, _BATCHING = FallbackReason.STATEFUL, FallbackReason.CONTINUOUS_BATCHING

_SCALARS = (bool, int, float, str)


class Purpose(Enum):
    """What a model is admitted for."""

    CALL = "a call of its generate"
    PART = "a decoding within a call whose generate is the model's own"
    WARM_UP = "steps of calls to come"
    ASSISTANT = "drafts for another model"
    REQUESTS = "continuous batching"


def admit(model: Any, purpose: Purpose, cache: Any = None) -> None:
    """Raise Unserved if a model cannot be served, before transformers prepares a call on it.

    This reads the facts of the model. `cache` is the caller's, if there is one.
    """
    if not compat.IS_TESTED:
        check_version()  # before anything of a version that nobody tried goes wrong
    _check_setup(model)
    if purpose is Purpose.CALL and compat.has_own_generate(model):
        return  # which decides what is decoded
    _check_kind(model)
    if cache is not None:
        _check_cache(model, cache)
    if purpose is Purpose.ASSISTANT:
        _check_trees(model)
    elif purpose is Purpose.REQUESTS:
        _check_rows(model)
    elif purpose is Purpose.WARM_UP:
        _check_blocks(model)


def check_version() -> None:
    """Raise Unserved if even a Llama of transformers is refused or decoded wrongly here.

    Then the cause is the installed version of transformers, not the model of a call.
    """
    if found := _stock_refusal():
        raise Unserved(FallbackReason.VERSION, f"transformers {compat.VERSION}: {found}")


@functools.cache
def _stock_refusal() -> str:
    """Return why a Llama of transformers is not served, "" if it is; asked once per process."""
    model = compat.tiny_llama()
    try:
        _check_setup(model)
        _check_kind(model)
        return self_test.fault(model, is_packed=False)
    except Unserved as unserved:
        return unserved.detail or unserved.reason.text
    except (MemoryError, OSError, RuntimeError):  # which is not the version's fault
        return ""
    except (AttributeError, KeyError, TypeError) as error:  # whatever this version does otherwise
        return f"{type(error).__name__}: {error}"


def admit_call(call: PreparedCall) -> None:
    """Raise Unserved if a prepared call on a model that was admitted cannot be served."""
    model = call.model
    _check_cache(model, call.cache)
    _check_arguments(call)
    _check_capacity(call)
    _check_length(call)
    if call.request.draws(call.do_sample):
        _check_trees(model)
    mixes_rows = call.request.config.draft_invariant and facts_of(model).has_experts
    _refuse_if(mixes_rows, FallbackReason.INVARIANCE, type(model).__name__)
    _check_blocks(model)  # the last one, since it may run forwards


def _refuse_if(is_met: object, reason: FallbackReason, detail: str = "", fix: str = "") -> None:
    if is_met:
        raise Unserved(reason, detail, fix)


def _check_blocks(model: Any) -> None:
    """Raise Unserved if a model of an unknown type fails its self test."""
    if model.config.is_encoder_decoder:
        repeats = facts_of(model).repeats_layers
        _refuse_if(repeats, _MODEL, "several layers share a layer of the cache")
        return
    found, fix = self_test.refusal(model)
    _refuse_if(found, _MODEL, found, fix)


def warn_of_rounding(model: Any) -> None:
    """Warn once for each model whose checkpoint has it quantise activations.

    Forwards of one token and of several round them to a coarse grid by other scales, so that tokens
    change more often than in half precision.
    """
    if compat.rounds_activations(model) and state_of(model).is_first("quantised activations"):
        warn_caller(
            f"{type(model).__name__} quantises activations: a block of tokens rounds otherwise "
            "than single tokens, so the speculative text can differ from that of plain generate",
            UserWarning,
        )


def takes_packed(call: PreparedCall) -> bool:
    """Return whether a call may run in packed blocks, whose attention alone tells rows apart.

    So nothing else may couple tokens or depend on rows, such as an argument with an entry for every
    row, or a hook.
    """
    passed = all(isinstance(each, _SCALARS) for each in call.passed.values())
    return passed and call.position_ids.dim() == 2 and model_takes_packed(call.model)


def model_takes_packed(model: Any) -> bool:
    """Return whether a model may run in packed blocks, if nothing in a call is against it."""
    facts = facts_of(model)
    if compat.decoder_names(model).positions is None or facts.is_hooked or watch.watcher():
        return False
    # A state belongs to a row, and so do columns.
    if not on_device(model, torch.device("cpu")):
        return False
    return attention.is_ours_everywhere(model) and not self_test.refusal(model, is_packed=True)[0]


def _check_kind(model: Any) -> None:
    """Raise Unserved if the model's type or configuration shows that no call can be served."""
    config = compat.text_config(model)
    types = {model.config.model_type, config.model_type} & UNSERVED_TYPES
    _refuse_if(types, _MODEL, f"model type {', '.join(map(repr, types))}")
    needed = compat.decoder_names(model).set_anew - {"use_cache", "logits_to_keep"}
    missing = needed - compat.forward_arguments(model)
    _refuse_if(missing, _MODEL, f"its forward names no argument {', '.join(sorted(missing))}")
    unknown = set(compat.mask_kinds(model)) - MASK_KINDS
    _refuse_if(unknown, _MODEL, f"layer type {', '.join(sorted(unknown))}")
    name = attention.own_name(config)
    if not name:
        return
    if name not in SERVED:
        _check_flash(model, name)
    is_stock, detail = compat.has_stock_masks(name), f"the mask function registered as {name!r}"
    _refuse_if(not is_stock, FallbackReason.ATTENTION, detail)


def _check_flash(model: Any, name: str) -> None:
    """Raise Unserved if an attention implementation is not flash attention that we may replace.

    In an encoder-decoder it is also that of cross-attention, which takes no mask of ours.
    """
    is_flash = compat.is_flash(compat.attention_function(name))
    _refuse_if(not is_flash, FallbackReason.ATTENTION, f"attention implementation {name!r}")
    stays = model.config.is_encoder_decoder or not attention.replaces(model, name)
    _refuse_if(stays, FallbackReason.ATTENTION, f"{name!r} in {type(model).__name__}")


def _check_states(model: Any) -> None:
    """Raise Unserved if the model keeps a recurrent state that cannot be rolled back."""
    mixers = facts_of(model).mixers
    _refuse_if(compat.is_stateful(model) and not mixers, _STATEFUL, type(model).__name__)
    is_missing = mixers and optional.find("recurrent states") is None
    _refuse_if(is_missing, _STATEFUL, "lookahead_hf.engines.hybrid is not installed")
    is_shared = len({getattr(mixer, "layer_idx", None) for mixer in mixers}) < len(mixers)
    _refuse_if(is_shared, _STATEFUL, "several modules keep the states of one layer")


def _check_trees(model: Any) -> None:
    has_states = facts_of(model).mixers
    _refuse_if(has_states, _STATEFUL, f"{type(model).__name__} verifies chains alone")


def _check_rows(model: Any) -> None:
    """Raise Unserved if texts cannot come and go in the rows of the model's cache."""
    facts, processes = facts_of(model), coordinator(model)
    is_spread = processes is not None and processes.is_spread(model)
    _refuse_if(is_spread, FallbackReason.TENSOR_PARALLEL, "in continuous batching")
    is_other = compat.has_own_generate(model) or model.config.is_encoder_decoder
    _refuse_if(is_other, _BATCHING, type(model).__name__)
    _refuse_if(compat.is_stateful(model) or facts.mixers, _STATEFUL, "in continuous batching")
    holds_more = {None, "indexed_attention"} & {*compat.layer_masks(model)}
    _refuse_if(holds_more, _BATCHING, "layers that hold more than K and V")
    _refuse_if(facts.needs_columns, _BATCHING, "a model that counts positions itself")


def _check_capacity(call: PreparedCall) -> None:
    """Raise Unserved if a cache is too small for a call's longest text; plain reports that."""
    model = call.model
    capacity = hf_layers.capacity(compat.self_attention(call.cache), compat.window(model))
    if capacity is None:
        return
    columns = call.num_columns  # perhaps only new ones
    if not compat.counts_positions(model):
        columns = compat.known_mask_length(call.generation_config, call.model_kwargs) or columns
    most_fed = columns + call.num_new - 1
    fix = f"give it room for {most_fed}, or pass a DynamicCache"
    _refuse_if(most_fed > capacity, _CACHE, f"a static cache of {capacity} columns", fix)


def _check_length(call: PreparedCall) -> None:
    """Raise Unserved if the call crosses a length at which the model's frequencies change.

    Such a model computes the frequencies of a forward from its longest position, so that a draft
    beyond the length would alter the tokens before it. The last new token is never fed.
    """
    limits = compat.rope_limits(call.model)
    if not limits or not call.position_ids.numel():  # the forward says what is wrong with it
        return
    newest = call.position_ids[..., -1]
    shortest = min(int(newest.min()) + 1, call.num_columns)
    longest = max(int(newest.max()) + 1, call.num_columns) + call.num_new - 1
    for rope_type, limit in limits.items():
        # Long factors hold for every forward that has one position beyond the limit.
        stays_long = rope_type == "longrope" and shortest > limit
        _refuse_if(
            longest > limit and not stays_long,
            _MODEL,
            f"its {rope_type!r} positions change beyond {limit} tokens",
            f"keep the prompt and max_new_tokens together within {limit} tokens",
        )


def on_device(model: Any, device: torch.device) -> bool:
    """Return whether steps can stay on the device of the prompt."""
    facts = facts_of(model)
    return facts.devices <= {device} and not facts.needs_columns and not facts.mixers


def _check_cache(model: Any, given: Any) -> None:
    """Raise Unserved if the cache that forwards are given cannot be taken over."""
    cache = compat.self_attention(given)
    kind = type(cache)
    _refuse_if(kind not in compat.CACHES, _CACHE, f"a cache of type {kind.__name__}")
    layer = hf_layers.unserved_layer(cache)
    _refuse_if(layer, _CACHE, layer or "")
    keeps_states = kind is compat.StaticCache and facts_of(model).mixers
    _refuse_if(keeps_states, _CACHE, "recurrent states in a static cache")
    _refuse_if(
        compat.counts_positions(model) and given.get_seq_length() > 0,
        _CACHE,
        "a decoder with an earlier text in its cache",
        f"leave {compat.GENERATE_CACHE} out",
    )


def _check_arguments(call: PreparedCall) -> None:
    """Raise Unserved if an argument of the model's forward is not supported."""
    names, given = call.names, call.model_kwargs
    _refuse_if(
        names.positions is not None and given.get(names.positions) is None,
        _ARGUMENT,
        "position_ids that generate could not prepare",
        "pass them, [rows, columns]",
    )
    dims = getattr(given.get(names.mask), "ndim", 2)
    detail, fix = f"an attention mask of {dims} dimensions", "pass one of [rows, columns]"
    _refuse_if(dims != 2, _ARGUMENT, detail, fix)
    _check_picture(call)
    known = names.prepared | compat.PROMPT_ONLY | set(compat.TOKEN_TYPES)
    if names.positions is None:
        known |= {"attention_mask"}  # the encoder's
    for name, value in given.items():
        is_unknown = name not in known and isinstance(value, torch.Tensor)
        _refuse_if(is_unknown, _ARGUMENT, f"the argument {name!r}")


def _check_picture(call: PreparedCall) -> None:
    """Raise Unserved if a block would look causally at a picture, which single tokens see whole."""
    crossing, given = compat.crossing_layers(call.model), call.model_kwargs
    if not crossing or given.get("cross_attention_mask") is not None:
        return
    is_cached = call.cache is not None and call.cache.get_seq_length(crossing[0]) > 0
    _refuse_if(
        is_cached or given.get("pixel_values") is not None,
        _ARGUMENT,
        "a picture without cross_attention_mask",
        "pass the mask that goes with it",
    )


def _check_setup(model: Any) -> None:
    """Read the facts of a model; raise Unserved if it cannot be speculated as it is set up now."""
    name, modules = type(model).__name__, read(model)
    if model.config.is_encoder_decoder:
        _check_encoder_decoder(model)
    _check_states(model)
    if compat.has_own_loop(model):
        raise Unserved(FallbackReason.OWN_LOOP, f"{name}._sample")
    if (processes := coordinator(model)) is not None:
        processes.check(model)
    _check_inputs(model)
    for module in modules:
        own = vars(module)  # a module's getattr is slow for missing attributes
        if compat.is_windowed_by_slot(module):
            raise Unserved(_MODEL, "a window that is cut out of a matrix")
        if module.training:
            _check_training(module)
        for variant in (own.get("lora_variant") or {}).values():
            if type(variant).__name__.startswith("ALora"):  # masks the last tokens of each block
                raise Unserved(FallbackReason.ADAPTER, type(variant).__name__)


def _check_encoder_decoder(model: Any) -> None:
    """Raise Unserved if it is not known where an encoder-decoder's tokens are."""
    kind, known, detail = model.config.model_type, ENCODER_DECODERS, type(model).__name__
    if compat.is_pair(model):
        kind, known = model.config.decoder.model_type, DECODERS_OF_PAIRS
        detail = f"{detail} with a decoder of type {kind!r}"
    if kind not in known:
        raise Unserved(FallbackReason.ENCODER_DECODER, detail)


def _check_inputs(model: Any) -> None:
    """Raise Unserved if something else, such as PEFT's prompt tuning, prepares each forward."""
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is type(model).prepare_inputs_for_generation:
        return
    owner = getattr(prepare, "__self__", prepare)
    kind = getattr(getattr(owner, "active_peft_config", None), "peft_type", None)
    name = str(getattr(kind, "value", type(owner).__name__))
    raise Unserved(FallbackReason.ADAPTER, f"{name} prepares its inputs")


def _check_training(module: Any) -> None:
    """Raise Unserved if a module in training mode drops out, or keeps no cache."""
    if getattr(module, "gradient_checkpointing", False):
        raise Unserved(FallbackReason.CHECKPOINTING, type(module).__name__)
    for name, value in vars(module).items():
        is_rate = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
        if is_rate and isinstance(value, (int, float)) and value > 0:
            raise Unserved(FallbackReason.DROPOUT, f"{type(module).__name__}.{name}={value}")

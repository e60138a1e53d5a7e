"""The arguments that a model's forward takes, and how its decoder positions tokens."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging import version
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import GenerationMixin
from transformers.generation import utils as generation_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from lookahead_hf.fallback import TRANSFORMERS, FallbackReason, Unserved


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """Names of the forward's arguments that every step sets anew."""

    ids: str
    mask: str
    positions: str | None  # None if the decoder derives positions itself
    columns: str | None = None  # replaces `positions` for such a decoder, if it takes them
    skips_pads: bool = False  # whether `columns` leaves out the prompt's pads
    cache: str = "past_key_values"
    has_states_alone: bool = False  # whether its cache holds recurrent states, and no K and V

    @property
    def prepared_cache(self) -> str:
        """Name of the cache among the arguments that `generate` prepares."""
        return GENERATE_CACHE if GENERATE_CACHE == "cache" else self.cache

    @property
    def set_anew(self) -> frozenset[str]:
        """Arguments of the forward that every step sets anew."""
        names = {self.ids, self.mask, self.cache, "use_cache", "logits_to_keep"}
        return frozenset(names | ({self.positions} if self.positions else set()))

    @property
    def prepared(self) -> frozenset[str]:
        """Arguments that `generate` prepares and that every step sets anew."""
        return self.set_anew - {self.cache} | {self.prepared_cache}


def decoder_names(model: Any) -> DecoderNames:
    """Return the names of the decoder's inputs in the model's forward."""
    arguments = forward_arguments(model)
    cache = next((name for name in CACHE_NAMES if name in arguments), GENERATE_CACHE)
    if model.config.is_encoder_decoder:
        # Pairs pass on what begins with "decoder_".
        told = "decoder_position_ids" in arguments or (
            is_pair(model) and "position_ids" in forward_arguments(model.decoder)
        )
        columns = "decoder_position_ids" if told else None
        skips_pads = model.config.model_type == "whisper"
        names = "decoder_input_ids", "decoder_attention_mask"
        return DecoderNames(*names, None, columns, skips_pads, cache)
    names = "input_ids", "attention_mask"
    if "position_ids" in arguments:
        return DecoderNames(*names, "position_ids", cache=cache)
    kinds = set(getattr(text_config(model), "layer_types", None) or ())
    if cache == "cache_params" or kinds == {"linear_attention"}:
        return DecoderNames(*names, None, cache=cache, has_states_alone=True)
    told = "position_ids" in forward_arguments(model.get_decoder())  # through the model's kwargs
    return DecoderNames(*names, None, "position_ids" if told else None, cache=cache)


_PREPARED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

GENERATE_CACHE = "cache" if "cache" in _PREPARED else "past_key_values"
"""Name of the cache among the arguments of `generate` and the fields of its output. It was renamed
in transformers 5.24."""

CACHE_NAMES = tuple(dict.fromkeys((GENERATE_CACHE, "past_key_values", "cache_params")))
"""Names of the cache among a forward's arguments and outputs. Code outside of transformers keeps
the older ones; the last one is that of models that keep recurrent states alone."""


def is_pair(model: Any) -> bool:
    """Return whether an encoder-decoder consists of two models, the second one a causal model."""
    return model.config.model_type in ("encoder-decoder", "vision-encoder-decoder")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among arguments of `generate` or of a layer, None without one."""
    for name in CACHE_NAMES:  # a generator would cost 0.03 ms per step with 30 layers
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def returned_cache(outputs: Any, given: Any = None) -> Any:
    """Return the cache that a forward returned, under any name if it was `given` one.

    Unserved if it was given none, and returned none under a name that is known here.
    """
    for name in CACHE_NAMES:
        if name in outputs.keys():  # noqa: SIM118  # `in outputs` also takes names that it renames
            return outputs[name]
    if given is not None:
        return given
    detail = f"{type(outputs).__name__} has no field {' or '.join(CACHE_NAMES)}"
    raise Unserved(FallbackReason.MODEL, detail)


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of the forward's arguments."""
    kind: Any = type(model)
    return _signature(kind)


@functools.lru_cache(maxsize=256)
def _signature(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has forward hooks other than those that transformers leaves there.

    They come with the first request for hidden states or attentions and stay. In a forward without
    such a request they do nothing.
    """
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any(hooks) and not all(
        getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
        for each in hooks
        for hook in each.values()
    )


def is_recording() -> bool:
    """Return whether transformers collects outputs of modules in the forward in progress."""
    return bool(output_capturing._active_collector.get())  # empty where none was asked for


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate moves a module's tensors before and after its forward."""
    return "_hf_hook" in vars(module)


_ROUNDING = re.compile(
    r"'quant_method': [^,]*'(fp8|fbgemm_fp8|bitnet|fp_quant)'|load_in_8bit': True"
    r"|'activations': (?!None)|input_activations('?: |=)(?!None)|(Dynamic|Static)Activation"
)
"""What the fields of a `quantization_config` show if activations are quantised, too."""


def rounds_activations(model: Any) -> bool:
    """Return whether a model's checkpoint has it quantise activations."""
    config = getattr(model.config, "quantization_config", None) or {}
    fields = str(config if isinstance(config, dict) else vars(config))
    return bool(_ROUNDING.search(fields)) and "'dequantize': True" not in fields


VERSION = transformers.__version__

IS_TESTED = SpecifierSet(TRANSFORMERS).contains(VERSION, prereleases=True)
"""Whether the installed transformers is one of the versions that were tested."""


def tiny_llama() -> Any:
    """Return a random Llama with one layer; the random generators of the process stay as they are.

    It stands for all models of this version of transformers.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=64)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return transformers.LlamaForCausalLM(config).float().eval()


def is_stock(model: Any, modules: Iterable[nn.Module]) -> bool:
    """Return whether transformers' own methods run the model of `modules`, decoder and layers."""
    kind, decoder = type(model), type(model.get_decoder())
    layers = [each for each in modules if isinstance(each, GradientCheckpointingLayer)]
    if any("forward" in vars(each) and not is_offloaded(each) for each in layers):
        return False
    parts = [kind.prepare_inputs_for_generation, kind._update_model_kwargs_for_generation]
    kinds: set[Any] = {kind, decoder, *map(type, layers)}
    parts += [each.forward for each in kinds]
    return all(str(part.__module__).startswith("transformers.") for part in parts)


def repeats_layers(named: Iterable[tuple[str, nn.Module]]) -> bool:
    """Return whether several places of a list of layers name the same layer of the cache as theirs.

    A layer that was appended again does, and so does a copy of it. `named` are all modules of a
    model by their names, one that is there twice by both.
    """
    places = [
        (re.sub(r"\d+", "", name), index)
        for name, module in named
        if isinstance(index := vars(module).get("layer_idx"), int)
    ]
    return len(set(places)) < len(places)


def text_config(model: Any) -> Any:
    """Return the configuration of the part that decodes text."""
    return model.config.get_text_config(decoder=True)


def encoded(model: Any, inputs: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """Run a model's encoder on inputs, [rows, ...]."""
    encoder = model.get_encoder()
    given = {model.main_input_name: inputs}
    if mask is not None and "attention_mask" in forward_arguments(encoder):
        given["attention_mask"] = mask
    return encoder(**given, return_dict=True)


PROMPT_ONLY = frozenset(generation_utils.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) | {
    "input_ids",
    "inputs_embeds",
    "feature_attention_mask",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
}
"""Arguments that plain `generate` passes to the forward of the prompt only, and the mask of
`input_features`, which no other forward reads."""

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "cross_attention_mask")
"""Arguments that plain `generate` extends per token: by the row's last value, the second by 0."""


ROPE_NOTE = "rope_deltas"
"""Attribute in which `generate` keeps, for later calls, how positions differ from columns."""

NOTES = {ROPE_NOTE, "generation_config", "_is_hf_initialized"}
"""Attributes in which loading and `generate` keep what no forward reads."""


def counts_positions(model: Any) -> bool:
    """Return whether the decoder counts positions from the length of its cache."""
    names = decoder_names(model)
    return names.positions is None and not names.has_states_alone


def positions_by_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions that `generate` gives to columns, [rows, columns], by their mask."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def text_positions(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the position ids that `generate` gives to texts without padding, [..., rows, columns].

    `input_ids` are [rows, columns]. Positions with a height and a width have these dimensions
    before the rows. `ROPE_NOTE` stays as it was.
    """
    notes = [vars(module) for module in model.modules() if ROPE_NOTE in vars(module)]
    before = [note[ROPE_NOTE] for note in notes]
    given = {"attention_mask": torch.ones_like(input_ids)}
    try:
        return model._prepare_position_ids_for_generation(input_ids, given)
    finally:
        for note, value in zip(notes, before, strict=True):
            note[ROPE_NOTE] = value


def counted_tables(model: Any) -> list[nn.Module]:
    """Return the modules in which a decoder looks up the positions that it counts."""
    table = getattr(decoder_of(model), "embed_positions", None)
    return [] if table is None or decoder_names(model).columns else [table]


def decoder_of(model: Any) -> Any:
    """Return the decoder alone, without a head.

    Florence-2 returns its encoder and decoder of texts, a pair of models its causal model.
    """
    found = model.get_decoder()
    if is_pair(model):
        return found.get_decoder()
    return getattr(found, "decoder", found) if model.config.is_encoder_decoder else found


def is_computed(table: nn.Module) -> bool:
    """Return whether a table of positions is computed and skips pads."""
    return hasattr(table, "weights")


def _grows(table: nn.Module) -> bool:
    return hasattr(table, "make_weights")


def entries_of_columns(table: Any, columns: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Look up tokens of these columns and ids in a computed table, [rows, width, dim]."""
    places = columns + 1 + table.padding_idx
    most = int(places.max()) + 1
    if _grows(table) and most > table.weights.shape[0]:
        table.make_weights(most + table.offset, table.embedding_dim, table.padding_idx)
    places = torch.where(ids == table.padding_idx, table.padding_idx, places)
    return table.weights[places].detach()


def has_relative_bias(module: nn.Module) -> bool:
    """Return whether an attention adds a bias by the distance of two tokens."""
    return bool(getattr(module, "has_relative_attention_bias", False))


def is_windowed_by_slot(module: nn.Module) -> bool:
    """Return whether an attention cuts its window out of a causal matrix, the buffer `bias`."""
    return "bias" in module._buffers and getattr(module, "attention_type", None) == "local"


def position_table(model: Any) -> int | None:
    """Return the size of the model's position table; None if positions are unlimited."""
    config = text_config(model)
    if getattr(config, "rope_parameters", None):
        return None
    if counts_positions(model) and any(map(_grows, counted_tables(model))):
        return None
    end = getattr(config, "max_target_positions", None)  # the decoder's own
    return end or getattr(config, "max_position_embeddings", None)


def rope_limits(model: nn.Module) -> dict[str, int]:
    """Return the rope types whose frequencies change with length, and the length from which on."""
    config = text_config(model)
    given = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in given.values() if isinstance(each, dict)]
    limits = {}
    for parameters in by_layer_type or [given]:
        rope_type = parameters.get("rope_type") or "default"
        if rope_type == "longrope":
            limits[rope_type] = int(parameters["original_max_position_embeddings"])
        elif "dynamic" in rope_type:
            limits[rope_type] = int(config.max_position_embeddings)
    # Some models call fixed frequencies "dynamic" and rename them in their modules.
    return {kind: limits[kind] for kind in limits.keys() & _rope_types(model)} if limits else {}


def most_positions(model: Any) -> int | None:
    """Return the most tokens before the model's positions end or change, None without a limit."""
    ends = [*rope_limits(model).values(), position_table(model)]
    return min((end for end in ends if end is not None), default=None)


_SELECTS_LONG_FACTORS = version.parse(transformers.__version__) >= version.parse("5.23")


def reads_lengths(model: nn.Module) -> bool:
    """Return whether a forward reads the longest position back, which no graph captures."""
    kinds = set(rope_limits(model))
    return bool(kinds - {"longrope"} if _SELECTS_LONG_FACTORS else kinds)


def _rope_types(model: nn.Module) -> set[str]:
    found = (vars(module).get("rope_type") for module in model.modules())
    each = (kind.values() if isinstance(kind, dict) else [kind] for kind in found if kind)
    return {kind for kinds in each for kind in kinds}

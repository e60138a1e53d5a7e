"""Every line that depends on how transformers is built inside."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging import version
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation import utils as generation_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import (
    ALL_ATTENTION_FUNCTIONS,
    AttentionInterface,
    PreTrainedModel,
)

EmptyLayer = getattr(cache_utils, "DummyLayer", DynamicLayer)
"""What stands for a layer without K and V of its own; up to 5.19 one that stays empty."""

CACHES = (DynamicCache, StaticCache)
"""Caches, by exact type, that are nothing but a list of layers."""

PROMPT_ONLY = frozenset(generation_utils.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) | {
    "input_ids",
    "inputs_embeds",
}
"""Arguments of the forward that plain `generate` passes with the prompt and never again."""

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments that plain extends for every new token: by the row's last value, by 0."""


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """What a forward calls the inputs that every step sets anew.

    Attributes:
        ids: Token ids.
        mask: The attention mask.
        positions: The positions; None where the decoder counts them itself.
        columns: What a decoder that counts by itself takes instead; None where it takes nothing.
        skips_pads: Whether what it then takes does not count the prompt's pads.
    """

    ids: str
    mask: str
    positions: str | None
    columns: str | None = None
    skips_pads: bool = False

    @property
    def prepared(self) -> frozenset[str]:
        """Arguments that `generate` prepares itself and that a step sets anew."""
        names = {self.ids, self.mask, "past_key_values", "use_cache", "logits_to_keep"}
        return frozenset(names | ({self.positions} if self.positions else set()))


def decoder_names(model: Any) -> DecoderNames:
    """What the model's forward calls the inputs of its decoder."""
    if model.config.is_encoder_decoder:
        told = "decoder_position_ids" in forward_arguments(model)
        columns = "decoder_position_ids" if told else None
        skips_pads = model.config.model_type == "whisper"
        names = "decoder_input_ids", "decoder_attention_mask"
        return DecoderNames(*names, None, columns, skips_pads)
    return DecoderNames("input_ids", "attention_mask", "position_ids")


def counts_positions(model: Any) -> bool:
    """Whether the decoder counts positions from the length of its cache."""
    return decoder_names(model).positions is None


def counted_tables(model: Any) -> list[nn.Module]:
    """Modules in which a decoder looks up the positions that it has counted."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    return [] if table is None or decoder_names(model).columns else [table]


def grows(table: nn.Module) -> bool:
    """Whether a table of positions is computed, as far as a text goes, and has none for pads."""
    return hasattr(table, "make_weights")


def entries_of_columns(table: Any, columns: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What a table that `grows` has for tokens in these columns, [rows, width, dim].

    Args:
        table: The table; it is made longer where that is needed.
        columns: Column of every token, [rows, width].
        ids: The tokens, [rows, width].
    """
    places = columns + 1 + table.padding_idx
    most = int(places.max()) + 1
    if most > table.weights.shape[0]:
        table.make_weights(most + table.offset, table.embedding_dim, table.padding_idx)
    places = torch.where(ids == table.padding_idx, table.padding_idx, places)
    return table.weights[places].detach()


def counts_by_mask(model: Any) -> bool:
    """Whether a forward that is not told positions counts what its mask lets it see."""
    return any("cumsum(" in source for source in _decoder_sources(model))


def relative_biases(model: Any) -> list[Any]:
    """Attentions of a decoder that compute a bias from the distance of two tokens."""
    modules = model.get_decoder().modules()
    return [m for m in modules if getattr(m, "has_relative_attention_bias", False)]


def empty_cache(model: Any) -> Any:
    """An empty cache as `generate` makes it."""
    config = text_config(model)
    cache = DynamicCache(config=config)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=config))


def encoded(model: Any, inputs: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """What a model's encoder returns for inputs, [rows, ...]."""
    encoder = model.get_encoder()
    given = {model.main_input_name: inputs}
    if mask is not None and "attention_mask" in forward_arguments(encoder):
        given["attention_mask"] = mask
    return encoder(**given, return_dict=True)


def self_attention(cache: Any) -> Any:
    """The part of a cache that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def with_self_attention(cache: Any, grows: Any) -> Any:
    """The cache to hand a model in place of `cache` where another part `grows` with the text."""
    if not isinstance(cache, EncoderDecoderCache):
        return grows
    return EncoderDecoderCache(grows, cache.cross_attention_cache)


def prefill(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """Run the prompt through the model exactly as plain `generate` does."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


def is_stateful(model: Any) -> bool:
    """Whether the model keeps a recurrent state."""
    return bool(getattr(model, "_is_stateful", False))


def has_own_loop(model: Any) -> bool:
    """Whether the model's class brings a decoding loop in place of plain `generate`'s."""
    return bool(type(model)._sample.__module__ != generation_utils.__name__)


def num_tensor_parallel(model: Any) -> int:
    """Processes that share each of the model's matrices."""
    return int(getattr(model, "_tp_size", None) or 1)


def num_pipeline(model: Any) -> int:
    """Processes that run some of the model's layers each."""
    mesh = getattr(model, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.shape[names.index("pp")]) if mesh is not None and "pp" in names else 1


def are_unfinished(model: Any, is_finished: bool, device: torch.device) -> bool:
    """Tell all processes whether the texts of this one have ended, and hear whether any go on."""
    return bool(model._has_unfinished_sequences(is_finished, True, device))


def synced_gpus(model: Any, given: bool | None) -> bool:
    """Whether processes must step together, as `generate` itself works it out.

    `generate` computes it in here and then drops it for strategies that it is given.
    """
    return bool(model._extract_generation_mode_kwargs(None, {}, given, None, None)["synced_gpus"])


def known_mask_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Columns of the attention mask, where `generate` dropped it because it was all ones too."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[1])
    return getattr(generation_config, "_mask_length", None)


def pad_token(generation_config: Any) -> int | None:
    """The pad token id that `generate` settled on, if any."""
    tensor = getattr(generation_config, "_pad_token_tensor", None)
    return None if tensor is None else int(tensor)


def is_users_cache(cache: Any) -> bool:
    """Whether the caller of `generate` passed this cache, and so sees it afterwards."""
    return bool(getattr(cache, "_is_user_defined", False))


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Names that the model's forward accepts."""
    kind: Any = type(model)
    return _signature(kind)


@functools.lru_cache(maxsize=256)
def _signature(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def text_config(model: Any) -> Any:
    """The configuration of the part that decodes text."""
    return model.config.get_text_config(decoder=True)


def position_table(model: Any) -> int | None:
    """Positions that the model has a table for; None where they have no end, as rotary ones."""
    config = text_config(model)
    if getattr(config, "rope_parameters", None):
        return None
    if counts_positions(model) and any(map(grows, counted_tables(model))):
        return None
    end = getattr(config, "max_target_positions", None)  # of a decoder, beside its encoder's
    return end or getattr(config, "max_position_embeddings", None)


def rope_limits(model: nn.Module) -> dict[str, int]:
    """Rope types whose frequencies follow the longest position of a forward, and beyond what."""
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


_SELECTS_LONG_FACTORS = version.parse(transformers.__version__) >= version.parse("5.23")


def reads_lengths(model: nn.Module) -> bool:
    """Whether a forward asks the device for the longest position, which no graph can capture.

    Long factors ask since 5.23 no more.
    """
    kinds = set(rope_limits(model))
    return bool(kinds - {"longrope"} if _SELECTS_LONG_FACTORS else kinds)


def _rope_types(model: nn.Module) -> set[str]:
    """Rope types that the model's modules go by."""
    found = (vars(module).get("rope_type") for module in model.modules())
    each = (kind.values() if isinstance(kind, dict) else [kind] for kind in found if kind)
    return {kind for kinds in each for kind in kinds}


def attention_configs(model: nn.Module) -> list[Any]:
    """Every configuration object that the model's modules read their attention's name from."""
    found = {id(config): config for m in model.modules() if (config := getattr(m, "config", None))}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


def registry_configs(model: nn.Module) -> list[Any]:
    """Those of them whose modules look the name up in the registry.

    Falcon's, and some that are loaded as remote code, ask which of two names it is: another one
    sends them the wrong way.
    """
    configs, asking = attention_configs(model), _asking_configs.get(model)
    if asking is None:
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        asking = {id(part.config) for part in parts if not part._can_set_attn_implementation()}
        _asking_configs[model] = asking
    return [config for config in configs if id(config) not in asking]


_asking_configs: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()


def attention_name(config: Any) -> str | None:
    """Name of the attention implementation that a configuration asks for."""
    return config._attn_implementation_internal


def set_attention_name(config: Any, name: str | None) -> None:
    """Name another implementation, for this object only: the property sets those below it too."""
    config._attn_implementation_internal = name


def attention_function(name: str) -> Any:
    """The registered attention function of that name; None for one that is not registered."""
    return ALL_ATTENTION_FUNCTIONS.get(name)


def eager_attention(module: nn.Module) -> Any:
    """The eager attention function that a module's own file has."""
    forward = inspect.unwrap(type(module).forward)
    return forward.__globals__["eager_attention_forward"]


def has_only_flash_beside_eager(model: nn.Module) -> bool:
    """Whether a model says that its attention is eager or flash attention, but never sdpa."""
    supports = getattr(model, "_supports_sdpa", True), getattr(model, "_supports_flash_attn", False)
    return supports == (False, True)


def register_attention(name: str, function: Any, like: str) -> None:
    """Register an attention function whose masks are built as those of `like`."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[like])


def mask_kinds(model: nn.Module) -> tuple[str, ...]:
    """Names of the masks that the decoder takes as a dict; one name where it takes a single mask.

    Models that mix layer types read `attention_mask[layer_type]` when handed a dict. Models of one
    type build a sliding mask where their configuration has a window, a plain causal one otherwise.
    """
    config = text_config(model)
    sources = _decoder_sources(model)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and any("attention_mask, dict)" in s for s in sources):
        return tuple(sorted(set(layer_types)))
    sliding = any("create_sliding_window_causal_mask" in source for source in sources)
    windowed = getattr(config, "sliding_window", None) is not None
    return ("sliding_attention",) if sliding and windowed else ("full_attention",)


def window(model: nn.Module) -> int | None:
    """Columns that a sliding or chunked layer sees at most; None where the model has none."""
    config = text_config(model)
    widths = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return max((width for width in widths if width), default=None)


def has_experts(model: nn.Module) -> bool:
    """Whether some layer sends every token to a few of its experts."""
    return any("Expert" in type(module).__name__ for module in model.modules())


def takes_mask_dict(model: nn.Module) -> bool:
    """Whether the decoder accepts a dict of masks by layer type."""
    has_types = bool(getattr(text_config(model), "layer_types", None))
    return has_types and any("attention_mask, dict)" in s for s in _decoder_sources(model))


def layer_masks(model: nn.Module) -> tuple[str, ...]:
    """Name of the mask that each layer of the decoder takes; one name where all take the same."""
    kinds = mask_kinds(model)
    return tuple(text_config(model).layer_types) if takes_mask_dict(model) else kinds


_known_sources: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def _decoder_sources(model: nn.Module) -> list[str]:
    """Sources of the forwards that deal with masks; a call asks several times, a model is large."""
    known = _known_sources.get(model)
    if known is None:
        kinds: set[Any] = {type(module) for module in model.modules()}
        known = [source for kind in kinds if (source := _forward_source(kind))]
        _known_sources[model] = known
    return known


@functools.lru_cache(maxsize=4096)
def _forward_source(module_class: Any) -> str:
    """Source of a forward that deals with masks, else nothing."""
    try:
        source = inspect.getsource(inspect.unwrap(module_class.forward))
    except (OSError, TypeError, AttributeError):
        return ""
    return source if "attention_mask" in source else ""


__all__ = [
    "CACHES",
    "PROMPT_ONLY",
    "TOKEN_TYPES",
    "Cache",
    "DecoderNames",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "EmptyLayer",
    "EncoderDecoderCache",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "are_unfinished",
    "attention_configs",
    "attention_function",
    "attention_name",
    "counted_tables",
    "counts_by_mask",
    "counts_positions",
    "decoder_names",
    "eager_attention",
    "empty_cache",
    "encoded",
    "entries_of_columns",
    "forward_arguments",
    "grows",
    "has_experts",
    "has_only_flash_beside_eager",
    "has_own_loop",
    "is_stateful",
    "is_users_cache",
    "known_mask_length",
    "layer_masks",
    "mask_kinds",
    "num_pipeline",
    "num_tensor_parallel",
    "pad_token",
    "position_table",
    "prefill",
    "reads_lengths",
    "register_attention",
    "registry_configs",
    "relative_biases",
    "rope_limits",
    "self_attention",
    "set_attention_name",
    "synced_gpus",
    "takes_mask_dict",
    "text_config",
    "window",
    "with_self_attention",
]

"""What a model's forward takes, and what its source says."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.generation import utils as generation_utils


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


def encoded(model: Any, inputs: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """What a model's encoder returns for inputs, [rows, ...]."""
    encoder = model.get_encoder()
    given = {model.main_input_name: inputs}
    if mask is not None and "attention_mask" in forward_arguments(encoder):
        given["attention_mask"] = mask
    return encoder(**given, return_dict=True)


def captures_outputs(hook: Any) -> bool:
    """Whether a module's hook is one of those that transformers leaves there for good.

    It hangs them in once hidden states or attentions were asked for. In forwards that are not asked
    for them they do nothing.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def encodes(model: Any) -> bool:
    """Whether `generate` may run an encoder, of texts, sounds or pictures, before it decodes."""
    return bool(model.config.is_encoder_decoder or text_config(model) is not model.config)


def has_experts(model: nn.Module) -> bool:
    """Whether some layer sends every token to a few of its experts."""
    return any("Expert" in type(module).__name__ for module in model.modules())


_known_sources: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def decoder_sources(model: nn.Module) -> list[str]:
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


PROMPT_ONLY = frozenset(generation_utils.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) | {
    "input_ids",
    "inputs_embeds",
}
"""Arguments of the forward that plain `generate` passes with the prompt and never again."""

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments that plain extends for every new token: by the row's last value, by 0."""

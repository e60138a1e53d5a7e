"""The classes that the compiled kernels know: those of some decoders of transformers.

A class is known by its name and its file, and a class derived from it is another one. Whether the
kernels do what a layer of such a class does is shown in its first step.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead_hf.engines.cpu.kernels import fields


class Family(NamedTuple):
    """What the classes of a file of transformers have in common.

    Attributes:
        prefix: The prefix of their names.
        norm: What their RMS norms compute.
    """

    prefix: str
    norm: int = fields.RMS


FAMILIES = {
    "gemma": Family("Gemma", fields.RMS_FROM_ONE),
    "gemma2": Family("Gemma2", fields.RMS_FROM_ONE),
    "gemma3": Family("Gemma3", fields.RMS_FROM_ONE),
    "granite": Family("Granite"),
    "llama": Family("Llama"),
    "ministral": Family("Ministral"),
    "mistral": Family("Mistral"),
    "olmo2": Family("Olmo2", fields.RMS_WEIGHTED_WIDE),
    "phi3": Family("Phi3"),
    "phi4_multimodal": Family("Phi4Multimodal"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "smollm3": Family("SmolLM3"),
    "starcoder2": Family("Starcoder2"),
}
"""Families by the names of their files, which define all parts of layers but those in `STOCK`."""

PARTS = ("DecoderLayer", "Attention", "MLP", "RMSNorm")
"""Ends of the names of classes that layers consist of."""

MODELS = ("Model", "TextModel")
"""Ends of the names of classes that call nothing between their layers."""

ACTIVATIONS: dict[type, int] = {
    nn.SiLU: fields.SILU,
    type(ACT2FN["silu"]): fields.SILU,
    type(ACT2FN["gelu_pytorch_tanh"]): fields.GELU_TANH,
}
"""Activations by their classes."""

STOCK = {nn.Linear, nn.LayerNorm, nn.Dropout, *ACTIVATIONS}
"""Other classes that layers consist of."""

FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward", "repeat_kv")
"""Functions of a file that its layers call."""

OTHERS = {"torch": torch, "nn": nn, "ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS}
"""Other names of a file that its layers look up, with their original values."""


def family_of(kind: type, parts: tuple[str, ...]) -> Family | None:
    """Return the family that one of whose parts a class is, None if it is none's."""
    name = kind.__module__.rpartition(".modeling_")[2]
    family = FAMILIES.get(name)
    if family is None or kind.__module__ != f"transformers.models.{name}.modeling_{name}":
        return None
    return family if kind.__name__ in [family.prefix + part for part in parts] else None


def is_original(function: Any) -> bool:
    """Return whether a function and all that it wraps are torch's or transformers' own."""
    return _is_of_library(inspect.unwrap(function, stop=lambda each: not _is_of_library(each)))


def _is_of_library(function: Any) -> bool:
    name = str(getattr(function, "__globals__", {}).get("__name__"))
    return name.partition(".")[0] in ("torch", "transformers")

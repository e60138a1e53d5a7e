"""Detects models that quantise activations: their text may depend on the tokens of a forward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lookahead_hf import compat
from lookahead_hf.model.facts import ModelFacts, facts_of
from lookahead_hf.model_state import state_of
from lookahead_hf.utils.warn import warn_caller

_ALWAYS = ("fp8", "fbgemm_fp8", "bitnet", "fp_quant")
"""Methods of transformers that always quantise activations."""


def say_once(model: Any) -> None:
    """Warn once for each model whose text may differ from plain generation's.

    Forwards of one and of several tokens round activations to a coarse grid by other scales, so
    that tokens change more often than in half precision.
    """
    how = quantised_activations(model)  # in every call: it may be quantised after the first
    if how is not None and state_of(model).is_first("quantised activations"):
        warn_caller(
            f"{type(model).__name__} quantises activations ({how}): a block of tokens rounds "
            "otherwise than single tokens, so the speculative text can differ from that of plain "
            "generate",
            UserWarning,
        )


def quantised_activations(model: Any) -> str | None:
    """Return how a model quantises activations, None if it does not."""
    config = getattr(model.config, "quantization_config", None)
    return _by_config(_fields(config or {})) or _by_modules(model, facts_of(model))


def _fields(config: Any) -> Mapping[str, Any]:
    """Return the fields of a config; `to_dict` of torchao's loses its types."""
    return config if isinstance(config, Mapping) else vars(config)


def _by_config(config: Mapping[str, Any]) -> str | None:
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")))
    if method in _ALWAYS and not config.get("dequantize"):
        return method
    # bitsandbytes' object keeps the flag under a private name.
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return "LLM.int8"
    if method == "quanto" and config.get("activations") is not None:
        return f"quanto, {config['activations']}"
    if found := re.search(r"\w*(Dynamic|Static)Activation\w*", repr(config.get("quant_type"))):
        return found.group()
    inner = config.get("quantization_config", config)  # compressed-tensors' object holds its own
    for group in (_fields(inner).get("config_groups") or {}).values():
        if _fields(group).get("input_activations") is not None:
            return method
    return None


def _by_modules(model: nn.Module, facts: ModelFacts) -> str | None:
    """Detect models that were quantised after loading, by the types of their parts."""
    for name in sorted(facts.module_kinds):
        if name.startswith("torch.ao.nn.quantized"):
            return name
    for module in model.modules() if facts.has_odd_weights else ():
        weight = dict(compat.parameters_of(module).items()).get("weight")  # if scripted no dict
        if type(weight).__name__ == "LinearActivationQuantizedTensor":
            return type(weight).__name__
        if getattr(weight, "act_quant_kwargs", None) is not None:
            return f"{type(weight).__name__} with quantised inputs"
    return None

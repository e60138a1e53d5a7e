"""Models that quantise activations, whose text may depend on how many tokens a forward has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lookahead_hf.model_state import state_of
from lookahead_hf.utils.warn import warn_caller

_ALWAYS = ("fp8", "fbgemm_fp8", "bitnet", "fp_quant")
"""Methods of transformers that compute with quantised activations whatever else they are told."""


def say_once(model: Any) -> None:
    """Warn, at the first call of a model that does so, that its text may not be plain's.

    A forward of one token and a forward of several round activations to a coarse grid with other
    scales or from slightly other values, so that a token changes more often than in half precision.
    """
    how = quantised_activations(model)  # in every call: a model may be quantised after its first
    if how is not None and state_of(model).is_first("quantised activations"):
        warn_caller(
            f"{type(model).__name__} quantises activations ({how}): a block of tokens rounds "
            "otherwise than single tokens, so the speculative text can differ from that of plain "
            "generate",
            UserWarning,
        )


def quantised_activations(model: Any) -> str | None:
    """How a model quantises activations, None where it does not."""
    config = getattr(model.config, "quantization_config", None)
    return _by_config(_fields(config or {})) or _by_modules(model)


def _fields(config: Any) -> Mapping[str, Any]:
    """The fields of a config; `to_dict` of torchao's is a copy without its types."""
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


def _by_modules(model: Any) -> str | None:
    """What was quantised after loading says it by its types."""
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("torch.ao.nn.quantized"):
            return f"{kind.__module__}.{kind.__name__}"
        parameters = vars(module).get("_parameters", {})  # of a scripted module not a dict
        weight = dict(parameters.items()).get("weight")
        if type(weight).__name__ == "LinearActivationQuantizedTensor":
            return type(weight).__name__
        if getattr(weight, "act_quant_kwargs", None) is not None:
            return f"{type(weight).__name__} with quantised inputs"
    return None

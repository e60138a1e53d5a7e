"""What limits a model's calls: its positions, and quantised activations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lookahead_hf.call.prepared import PreparedCall
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.model import compat
from lookahead_hf.model.facts import ModelFacts, facts_of
from lookahead_hf.model.state import state_of
from lookahead_hf.utils import warn_caller


def check_length(call: PreparedCall) -> None:
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
        if longest > limit and not stays_long:
            raise Unserved(
                FallbackReason.MODEL,
                f"its {rope_type!r} positions change beyond {limit} tokens",
                f"keep the prompt and max_new_tokens together within {limit} tokens",
            )


def most_positions(model: Any) -> int | None:
    """Return the most tokens before the model's positions end or change, None without a limit."""
    ends = [*compat.rope_limits(model).values(), compat.position_table(model)]
    return min((end for end in ends if end is not None), default=None)


_ALWAYS = ("fp8", "fbgemm_fp8", "bitnet", "fp_quant")
"""Methods of transformers that always quantise activations."""


def warn_once(model: Any) -> None:
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

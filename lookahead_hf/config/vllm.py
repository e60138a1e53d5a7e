"""Reads vLLM's `speculative_config` as fields of a `SpeculativeConfig`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lookahead_hf.utils.spelling import known_names

_logger = logging.getLogger(__name__)

_KEYS = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": ("model",),
    "mtp": (),
}
"""The supported methods, and the keys that only this method takes."""

_LEARNED = _KEYS["suffix"][1:]
"""Limits of a draft's length; here learned acceptance rates and measured costs decide it."""


def is_vllm(values: Mapping[str, Any]) -> bool:
    """Whether a dict is vLLM's: it names a method or a number of speculative tokens."""
    return not values.keys().isdisjoint(("method", "num_speculative_tokens"))


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `SpeculativeConfig` that do what vLLM's `speculative_config` asks for.

    A log message gives the fields; it is a warning if something is left to do or has no effect.

    Raises:
        ValueError: The method is unknown, or a key has no counterpart.
    """
    # A model alone means a draft model.
    method = values.get("method", "draft_model" if "model" in values else None)
    if not isinstance(method, str) or method not in _KEYS:
        raise ValueError(f"method={method!r} is not known; {known_names(method, _KEYS)}")
    known = {"method", "num_speculative_tokens", *_KEYS[method]}
    if unknown := [str(name) for name in values if name not in known]:
        raise ValueError(
            f"method={method!r} does not take {', '.join(unknown)} here; known: "
            f"{', '.join(sorted(known))}"
        )
    fields = _drafters(method, values)
    if (most := values.get("num_speculative_tokens")) is not None:
        fields["max_draft_nodes"] = most
    notes = [
        f"{name} has no effect, drafts grow as they pay" for name in _LEARNED if name in values
    ]
    if "model" in values:
        notes.append(f"pass the model {values['model']!r} to each call, as assistant_model=")
    level = logging.WARNING if notes else logging.INFO
    _logger.log(level, "%s is read as %s", dict(values), "; ".join([str(fields), *notes]))
    return fields


def _drafters(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if method == "ngram":
        limits = {"max_ngram": "prompt_lookup_max", "min_ngram": "prompt_lookup_min"}
        given = {ours: values.get(theirs) for ours, theirs in limits.items()}
        options = {ours: value for ours, value in given.items() if value is not None}
        if any(type(value) is not int for value in options.values()):
            raise ValueError(f"prompt_lookup_min and prompt_lookup_max must be ints, not {options}")
        return {"drafters": ("ngram",), "options": {"ngram": options}}
    if method == "suffix":  # it remembers the texts of earlier requests unless told not to
        if values.get("suffix_decoding_max_cached_requests") == 0:
            return {"drafters": ("ngram",)}
        return {"drafters": ("ngram", "pool"), "learn": True}
    if method == "mtp":
        ahead = values.get("num_speculative_tokens")
        own = {} if ahead is None else {"num_draft": ahead}
        return {"drafters": ("mtp",), "options": {"mtp": own}}
    return {"drafters": ("assistant",)}

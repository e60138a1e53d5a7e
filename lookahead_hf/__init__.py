"""Training-free speculative decoding for Hugging Face transformers: the same text, faster."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing would double the time that this import takes
if TYPE_CHECKING:
    from typing import Any

    from lookahead_hf.config import SpeculativeConfig
    from lookahead_hf.draft import DraftTree
    from lookahead_hf.drafting.drafter import Drafter, Step, Traits
    from lookahead_hf.fallback import (
        FallbackReason,
        SpeculationFallbackError,
        SpeculationFallbackWarning,
    )
    from lookahead_hf.hook import (
        SpeculativeMixin,
        disable,
        disable_everywhere,
        enable,
        enable_everywhere,
        enabled,
        generate,
        learned_rates,
        set_default,
    )
    from lookahead_hf.pipelines import pipeline
    from lookahead_hf.stats import (
        SpeculativeStats,
        Totals,
        last_stats,
        on_stats,
        reset_totals,
        totals,
    )
    from lookahead_hf.warmup import warm_up

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "Drafter",
    "FallbackReason",
    "SpeculationFallbackError",
    "SpeculationFallbackWarning",
    "SpeculativeConfig",
    "SpeculativeMixin",
    "SpeculativeStats",
    "Step",
    "Totals",
    "Traits",
    "disable",
    "disable_everywhere",
    "enable",
    "enable_everywhere",
    "enabled",
    "generate",
    "last_stats",
    "learned_rates",
    "on_stats",
    "pipeline",
    "reset_totals",
    "set_default",
    "totals",
    "warm_up",
]

_NAMES = {
    "config": ["SpeculativeConfig"],
    "draft": ["DraftTree"],
    "drafting.drafter": ["Drafter", "Step", "Traits"],
    "fallback": ["FallbackReason", "SpeculationFallbackError", "SpeculationFallbackWarning"],
    "pipelines": ["pipeline"],
    "stats": ["SpeculativeStats", "Totals", "last_stats", "on_stats", "reset_totals", "totals"],
    "warmup": ["warm_up"],
}
"""Public names by their modules; all other names are in `hook`."""


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, since most of them need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = next((module for module, names in _NAMES.items() if name in names), "hook")
        found = importlib.import_module(f"{__name__}.{home}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "transformers" or not error.path:
            raise  # it is missing as a whole, or something else is
        from lookahead_hf.fallback import FallbackReason

        reason = FallbackReason.VERSION
        message = f"{reason.text} ({error}). To use it, {reason.fix}"
        raise ImportError(message, name=error.name, path=error.path) from error
    value = getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

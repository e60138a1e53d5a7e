"""Drafting: what proposes the next tokens, and how much of it is worth verifying."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AssistantDrafter": "..sources.assistant",
    "DraftTree": "..draft",
    "Drafter": ".drafter",
    "HeadsDrafter": "..sources.heads",
    "LookaheadDrafter": "..sources.lookahead",
    "MedusaDrafter": "..sources.heads",
    "MtpDrafter": "..sources.heads",
    "NgramDrafter": ".sources.ngram",
    "PoolDrafter": "..sources.pool",
    "PredictionDrafter": ".sources.prediction",
    "RecyclingDrafter": ".sources.recycling",
    "Step": ".drafter",
    "Traits": ".drafter",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name where it is first asked for: most of them pull in numba or torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)

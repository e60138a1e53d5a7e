"""Warnings that point at the user's code instead of a library."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_LIBRARIES = ("lookahead_hf", "transformers", "torch")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line of the nearest caller that belongs to none of these libraries."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)

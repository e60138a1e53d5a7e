"""How this package compiles its loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable[..., Any]) -> Any:
    """Compile without the interpreter lock, kept on disk where numba finds a writable folder."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's nor the user's cache folder can be written
        return njit(nogil=True)(function)

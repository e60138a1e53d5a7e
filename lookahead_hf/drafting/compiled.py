"""Chooses the drafting functions: numba's, or their plain twins where numba does not work."""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from types import ModuleType

from lookahead_hf import ngram_pool
from lookahead_hf.drafting import reference

_is_said = False


def functions() -> ModuleType:
    """The module with the tree and calibration functions; the first use imports numba."""
    return reference if ngram_pool.failed() else _fastest()


@functools.cache
def _fastest() -> ModuleType:
    try:
        from lookahead_hf.drafting import _numba
    except Exception:  # numba is missing or does not work
        return reference
    return _numba


def compile_or_say() -> None:
    """Compile all numba functions; where that fails, warn, and calls go on without them."""
    with suppress(Exception):
        ngram_pool.compile_now()
    try:
        ngram_pool.check_available()
    except ngram_pool.NumbaMissingError as error:
        say_once(error)


def say_once(error: ngram_pool.NumbaMissingError) -> None:
    """Warn once per process that drafters with an index are left out."""
    global _is_said
    if not _is_said:
        _is_said = True
        warnings.warn(
            f"the drafters 'ngram', 'recycling' and 'pool' are left out of calls: {error}",
            RuntimeWarning,
            stacklevel=4,
        )

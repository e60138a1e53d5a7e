"""Which drafting functions run: numba's or, where numba is missing, their plain twins."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType


@functools.cache
def has_numba() -> bool:
    """Whether compiled functions can be had at all."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def functions() -> ModuleType:
    """The module with the tree and calibration functions, importing numba on first use."""
    if has_numba():
        from lookahead_hf.drafting import _numba as compiled

        return compiled
    from lookahead_hf.drafting import reference

    return reference

"""How this package compiles its loops, and keeps them where it can."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)

_is_said = False


def jit(function: Callable[..., Any]) -> Any:
    """Compile without the interpreter lock, kept on disk where numba finds a writable folder."""
    dispatcher = njit(nogil=True)(function)
    try:
        dispatcher._cache = KeptOrNot(function)  # as `cache=True` does with numba's own
    except (OSError, RuntimeError) as error:  # no folder can be written to
        _say_once(error)
    return dispatcher


class KeptOrNot(FunctionCache):
    """numba's cache on disk; a full disk or a damaged file costs the time to compile again.

    numba's own lets such an error end the call of the function that was to be compiled.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, None where it was not kept."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            logger.info("a compiled function cannot be read: %r", error)
            with suppress(Exception):
                self.flush()  # a damaged index would be read again by all that save
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function, if that can be done."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _say_once(error)


def _say_once(error: Exception) -> None:
    global _is_said
    if not _is_said:
        _is_said = True
        logger.warning(
            "compiled functions cannot be kept (%s), so that every process compiles them anew, for "
            "some seconds: let NUMBA_CACHE_DIR name a folder that can be written to",
            error,
        )

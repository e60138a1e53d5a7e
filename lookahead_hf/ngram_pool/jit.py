"""Compiles this package's loops with numba, and keeps the compiled code on disk if possible."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)

_has_warned = False


class _OnThread(threading.local):
    only_loads = False


on_thread = _OnThread()
"""`only_loads`: whether a function that is not on disk raises NotSaved on this thread. One that no
folder can keep is compiled nevertheless."""


class NotSaved(BaseException):
    """A function is not on disk. Code that handles a failing compilation must not catch this."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile without the interpreter lock; keep the code on disk if a folder is writable."""
    dispatcher = njit(nogil=True)(function)
    try:
        dispatcher._cache = TolerantCache(function)  # what `cache=True` does with numba's own
    except (OSError, RuntimeError) as error:  # no folder is writable
        _warn_once(error)
    return dispatcher


class TolerantCache(FunctionCache):
    """numba's cache on disk; after a full disk or a damaged file it compiles again.

    With numba's own cache, such an error ends the call of the function to be compiled.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function, None if the cache does not have it."""
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:
            logger.info("a compiled function cannot be read: %r", error)
            with suppress(Exception):
                self.flush()  # every save would read a damaged index again
        if found is None and on_thread.only_loads:
            raise NotSaved
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function, if that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn_once(error)


def _warn_once(error: Exception) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "compiled functions cannot be saved (%s), so every process spends some seconds to "
            "compile them again: set NUMBA_CACHE_DIR to a writable folder",
            error,
        )

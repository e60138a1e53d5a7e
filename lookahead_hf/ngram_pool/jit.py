"""Compiles this package's loops with numba, and keeps the compiled code on disk if possible."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

logger = logging.getLogger(__name__)

_has_warned = False


class _OnThread(threading.local):
    only_loads = False


on_thread = _OnThread()
"""`only_loads`: whether functions that are not on disk raise NotSaved on this thread. One that no
folder can keep is compiled nevertheless."""


class NotSaved(BaseException):
    """A function is not on disk; code that handles a failing compilation must not catch this."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile without the interpreter lock; keep the code on disk if a folder is writable."""
    return _kept(njit(nogil=True)(function), function)


def jit_numbers(function: Callable[..., Any]) -> Any:
    """Compile a function whose divisions by zero give infinity, as in vectors.

    It may be made of functions in other files of its folder: code on disk that is older than one of
    these does not count.
    """
    compiled = njit(nogil=True, error_model="numpy")(function)
    return _kept(compiled, function, _folder_of(function))


def entry_point(signature: Any) -> Callable[[Callable[..., Any]], EntryPoint]:
    """Compile a function that C code can call by its address; keep the code on disk."""
    return lambda function: EntryPoint(signature, function)


class EntryPoint:
    """A function for C code, compiled when its address is first asked for."""

    def __init__(self, signature: Any, function: Callable[..., Any]) -> None:
        self._arguments: tuple[Any, ...] = function, sigutils.normalize_signature(signature), {}, {}

    @cached_property
    def address(self) -> int:
        compiled: Any = CFunc(*self._arguments)
        _kept(compiled, self._arguments[0], _folder_of(self._arguments[0])).compile()
        self._compiled = compiled  # which owns the code
        return int(compiled.address)


def _folder_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return names, times and sizes of the files beside a function's, which numba ignores."""
    try:
        files = sorted(Path(function.__code__.co_filename).parent.glob("*.py"))
        return tuple((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in files)
    except OSError:
        return ()


def _kept(compiled: Any, function: Callable[..., Any], depends_on: tuple[Any, ...] = ()) -> Any:
    """Give a numba function our cache, as `cache=True` gives it numba's own."""
    try:
        compiled._cache = TolerantCache(function)
        compiled._cache.depends_on = depends_on
    except (OSError, RuntimeError) as error:  # no folder is writable
        _warn_once(error)
    return compiled


class TolerantCache(FunctionCache):
    """numba's cache on disk, which compiles again after a full disk or a damaged file."""

    depends_on: tuple[Any, ...] = ()  # what the code depends on besides the function's own file

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), self.depends_on)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
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

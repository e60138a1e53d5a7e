"""Whether numba's functions are ready, and how to get them ready without stalling a call."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_ATTEMPTS = 60.0
"""Compiling that failed is tried again by a call that begins so much later."""

_pending: list[Callable[[], None]] = []
_compiling = threading.Lock()
_compiler: int | None = None
"""The thread that compiles, None where none does."""
_background: threading.Thread | None = None
_failure: Exception | None = None
"""Why the last attempt to compile failed, None where none has or where a later one went well."""
_failed_at = 0.0


class NumbaMissingError(ImportError):
    """An index was asked for, and numba is missing or does not work."""

    def __init__(self, reason: BaseException | None = None) -> None:
        """`reason`: what was raised for it, None where numba was not found."""
        self.reason = reason
        is_missing = reason is None or getattr(reason, "name", None) == "numba"
        said = f"{type(reason).__name__}: {reason}"
        why = "is not installed" if is_missing else f"does not work here ({said})"
        super().__init__(
            f"indexes of token ids need numba, which {why}: `pip install numba` brings one that "
            "fits the other packages; or leave out the drafters that keep an index"
        )


def register(warm_up: Callable[[], None]) -> None:
    """Add a function that calls every numba function of a module once, with the real types."""
    _pending.append(warm_up)


def available() -> bool:
    """Whether indexes can be built: numba is installed and has not failed to compile."""
    return not failed() and _is_installed()


def check_available() -> None:
    """Raise NumbaMissingError where indexes cannot be built."""
    if failed():
        raise NumbaMissingError(getattr(_failure, "reason", _failure)) from _failure
    if not _is_installed():
        raise NumbaMissingError


def failed() -> bool:
    """Whether the last attempt to compile failed; not so for the thread that tries once more."""
    return _failure is not None and threading.get_ident() != _compiler


def compiled() -> bool:
    """Whether everything is compiled (or loaded from numba's cache), so that no call waits."""
    return not _pending


def ready() -> bool:
    """Whether a call can go on: everything is compiled, or cannot be; else it is begun here."""
    compile_in_background()
    return compiled() or not available()


def compile_now() -> None:
    """Compile everything that is not compiled yet, or wait until another thread has done so.

    It takes some seconds once per installation and tenths of a second later: numba keeps what it
    compiled beside the package or, where that is read-only, in the user's cache folder
    (`NUMBA_CACHE_DIR` names another).

    Raises:
        NumbaMissingError: numba is missing or cannot be imported.
    """
    global _compiler, _failure, _failed_at
    with _compiling:
        _compiler = threading.get_ident()
        try:
            while _pending:
                _pending[0]()
                del _pending[0]
            _failure = None
        except Exception as error:
            _failure, _failed_at = error, time.monotonic()
            raise
        finally:
            _compiler = None


def compile_in_background() -> None:
    """Start `compile_now` in a thread, unless it is running, has run, or has lately failed."""
    global _background, _failure, _failed_at
    if compiled() or not _is_worth_trying() or (_background and _background.is_alive()):
        return
    # Not a daemon: a script that ends early leaves a filled cache to the next one.
    thread = threading.Thread(target=_compile_or_note, name="lookahead-hf-compile")
    try:
        thread.start()
    except RuntimeError as error:  # there are too many threads, or the interpreter is ending
        _failure, _failed_at = error, time.monotonic()
    else:
        _background = thread


def _is_worth_trying() -> bool:
    """Not where numba cannot be imported: a process that is running will not change that."""
    if _failure is None:
        return _is_installed()
    due = time.monotonic() - _failed_at >= SECONDS_BETWEEN_ATTEMPTS
    return due and not isinstance(_failure, NumbaMissingError)


def _compile_or_note() -> None:
    try:
        compile_now()
    except Exception:  # calls go on without indexes, and say so
        logger.info("numba's functions could not be compiled", exc_info=True)


def _is_installed() -> bool:
    if "numba" in sys.modules:
        return sys.modules["numba"] is not None
    return importlib.util.find_spec("numba") is not None

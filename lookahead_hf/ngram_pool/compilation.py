"""Whether numba's functions are ready, and how to get them ready without stalling a call."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_pending: list[Callable[[], None]] = []
_compiling = threading.Lock()
_background: threading.Thread | None = None
_failed = False


class NumbaMissingError(ImportError):
    """An index was asked for, and numba cannot be imported."""

    def __init__(self) -> None:
        super().__init__(
            "indexes of token ids need numba, which cannot be imported here: install it with "
            "`pip install numba`, or leave out the drafters that keep an index"
        )


def register(warm_up: Callable[[], None]) -> None:
    """Add a function that calls every numba function of a module once, with the real types."""
    _pending.append(warm_up)


def available() -> bool:
    """Whether indexes can be built: numba is installed and has not failed to compile."""
    return not _failed and importlib.util.find_spec("numba") is not None


def compiled() -> bool:
    """Whether everything is compiled (or loaded from numba's cache), so that no call waits."""
    return not _pending


def compile_now() -> None:
    """Compile everything that is not compiled yet, or wait until another thread has done so.

    It takes some seconds once per installation and tenths of a second later: numba keeps what it
    compiled beside the package or, where that is read-only, in the user's cache folder
    (`NUMBA_CACHE_DIR` names another).

    Raises:
        NumbaMissingError: numba cannot be imported.
    """
    with _compiling:
        while _pending:
            _pending[0]()
            del _pending[0]


def compile_in_background() -> None:
    """Start `compile_now` in a thread, unless it is running, has run, or has failed."""
    global _background
    if compiled() or _failed or (_background is not None and _background.is_alive()):
        return
    # Not a daemon: a script that ends early leaves a filled cache to the next one.
    _background = threading.Thread(target=_compile_or_warn, name="lookahead-hf-compile")
    _background.start()


def _compile_or_warn() -> None:
    global _failed
    try:
        compile_now()
    except Exception as error:
        _failed = True
        logger.warning("no drafts from indexes: numba could not compile them (%s)", error)

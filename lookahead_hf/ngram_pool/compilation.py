"""Compiles numba's functions without stalling a call, and knows whether they are ready."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_pending: list[Callable[[], None]] = []
_modules: list[str] = []
"""Modules that hold the numba functions of what is pending."""
_compiling = threading.Lock()
_background: threading.Thread | None = None
_started = 0.0
"""When the background thread was started, in seconds of `time.monotonic`."""
_child: subprocess.Popen[bytes] | None = None
"""The process that compiles for the background thread."""
_failure: Exception | None = None
"""Why the last attempt to compile failed; None if it succeeded or there was none."""


class NumbaMissingError(ImportError):
    """Drafting needs numba, which is missing or does not work."""

    def __init__(self, reason: BaseException | None = None) -> None:
        """`reason`: the exception that was raised, None if numba was not found."""
        self.reason = reason
        is_missing = reason is None or getattr(reason, "name", None) == "numba"
        error = f"{type(reason).__name__}: {reason}"
        why = "is not installed" if is_missing else f"does not work here ({error})"
        super().__init__(
            f"drafting needs numba, which {why}: `pip install numba` installs a version that fits "
            "the other packages"
        )


@contextmanager
def importing_numba() -> Iterator[None]:
    """Raise NumbaMissingError for anything that importing compiled functions raises.

    numba fails in many ways if other packages do not fit it.
    """
    try:
        yield
    except Exception as error:
        raise NumbaMissingError(error) from error


def register(warm_up: Callable[[], None], *modules: str) -> None:
    """Add a function that calls every numba function of some modules once, with the real types."""
    _pending.append(warm_up)
    _modules.extend(modules)


def available() -> bool:
    """Return whether numba is installed and has not failed to compile."""
    return _failure is None and _is_installed()


def check_available() -> None:
    """Raise NumbaMissingError if numba is not installed or has failed to compile."""
    if _failure is not None:
        raise NumbaMissingError(getattr(_failure, "reason", _failure)) from _failure
    if not _is_installed():
        raise NumbaMissingError


def compiled() -> bool:
    """Return whether everything is compiled (or loaded from numba's cache), so no call waits."""
    return not _pending


def ready() -> bool:
    """Return whether everything is compiled; if not, start to compile."""
    compile_in_background()
    return compiled()


def compile_now() -> None:
    """Compile everything that is not compiled yet, or wait until another thread has done so.

    This takes some seconds once per installation and tenths of a second later: numba keeps its
    compiled functions beside the package or, if that folder is read-only, in the user's cache
    folder (`NUMBA_CACHE_DIR` names another one).

    Raises:
        NumbaMissingError: numba is missing or cannot be imported.
    """
    global _failure
    with _compiling:
        try:
            while _pending:
                _pending[0]()
                del _pending[0]
            _failure = None
        except Exception as error:
            _failure = error
            raise


def wait_until_loaded(timeout: float) -> None:
    """Start to compile, and wait while it only loads, until so many seconds after its start."""
    compile_in_background()
    while _background is not None and _background.is_alive() and _child is None:
        _background.join(0.02)
        if time.monotonic() > _started + timeout:
            return


def compile_in_background() -> None:
    """Start `compile_now` in a thread, unless it is running, has run, or has failed."""
    global _background, _started, _failure
    if compiled() or not available() or (_background and _background.is_alive()):
        return
    # Not a daemon: a script that ends early still fills the cache for the next one.
    thread = threading.Thread(target=_compile_quietly, name="lookahead-hf-compile")
    try:
        thread.start()
    except RuntimeError as error:  # there are too many threads, or the interpreter is ending
        _failure = error
    else:
        _background, _started = thread, time.monotonic()


def _compile_quietly() -> None:
    global _failure
    try:
        if not _is_saved():
            _compile_elsewhere()
        if threading.main_thread().is_alive():
            compile_now()
    except Exception as error:  # calls continue without indexes, and report that
        _failure = error
        logger.info("numba's functions could not be compiled", exc_info=True)


def _forget_threads() -> None:
    """Begin anew in a forked process, which has none of the threads."""
    global _compiling, _background, _child
    _compiling, _background, _child = threading.Lock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _is_saved() -> bool:
    """Return whether each module has compiled functions on disk, or cannot be imported."""
    try:
        from lookahead_hf.ngram_pool.jit import is_saved

        for module in _modules:
            importlib.import_module(module)
    except Exception:  # as `compile_now` finds, too
        return True
    return all(map(is_saved, _modules))


_IN_CHILD = "LOOKAHEAD_HF_COMPILING"
"""Set in the environment of the process that compiles, which starts no other."""

_CHILD = """\
import sys
sys.path[:] = [path for path in sys.path if path]  # not the current directory
import contextlib, os
with contextlib.suppress(OSError, AttributeError):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as weight:
    weight.write("19")  # a new session is scheduled as a group, beside that of the call
import lookahead_hf.drafting.registry
from lookahead_hf import ngram_pool
ngram_pool.compile_now()
"""


def _compile_elsewhere() -> None:
    """Let another process compile and keep the functions on disk.

    A thread of this process would hold the interpreter's lock for most of its time: a call beside
    it takes ten times as long. The other process runs where cores are idle. If it fails, this one
    compiles. If this one ends first, the other goes on and fills the disk for the next.
    """
    global _child
    # The executable of a packaged program is the program.
    if _IN_CHILD in os.environ or getattr(sys, "frozen", False) or not sys.executable:
        return
    paths = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {"PYTHONPATH": paths, _IN_CHILD: "1"}
    nothing = subprocess.DEVNULL
    try:
        _child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env=env,
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,  # an interrupt at a prompt is not for it
        )
        while _child.poll() is None and threading.main_thread().is_alive():
            time.sleep(0.1)
    except Exception as error:  # whatever forbids processes here
        logger.info("no process compiles numba's functions: %r", error)
    finally:
        _child = None


def _is_installed() -> bool:
    if "numba" in sys.modules:
        return sys.modules["numba"] is not None
    return importlib.util.find_spec("numba") is not None

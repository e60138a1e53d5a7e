"""Loads or compiles numba's functions without stalling a call, and knows when they are ready."""

from __future__ import annotations

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
_compiling = threading.Lock()
_background: threading.Thread | None = None
_child: subprocess.Popen[bytes] | None = None
"""The process that compiles what is not on disk; None where none was needed so far."""
_child_started = 0.0
"""When it was started, in seconds of `time.monotonic`."""
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


def register(warm_up: Callable[[], None]) -> None:
    """Add a function that calls all numba functions of a module once, with the real types."""
    _pending.append(warm_up)


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
    """Begin to load the functions, unless that goes on, and wait for it at most so many seconds."""
    before = _background
    compile_in_background()
    if _background is not None and _background is not before:
        _background.join(timeout)


def compile_in_background() -> None:
    """Begin to load or compile, unless that goes on, is done, or has failed."""
    global _background, _failure
    if compiled() or not available() or _is_busy():
        return
    # Not a daemon: a process that ends must not tear it out of LLVM's code.
    thread = threading.Thread(target=_load_or_compile, name="lookahead-hf-compile")
    try:
        thread.start()
    except RuntimeError as error:  # there are too many threads, or the interpreter is ending
        _failure = error
    else:
        _background = thread


def _is_busy() -> bool:
    """Whether the functions are being loaded or compiled, here or in the other process."""
    is_loading = _background is not None and _background.is_alive()
    return is_loading or (_child is not None and _child.poll() is None)


def give_way() -> None:
    """Leave the cores for a moment to the process that compiles, once it has worked for long.

    Steps without a pause keep two cores busy, with threads that wait for each other, too. The
    process would hardly ever run.
    """
    if _child is not None and time.monotonic() > _child_started + PATIENCE and _is_busy():
        time.sleep(MOMENT)


def _load_or_compile() -> None:
    """Load the functions; if one is not on disk, let another process compile, or else this one."""
    global _failure
    try:
        with importing_numba():
            from lookahead_hf.ngram_pool import jit
        jit.on_thread.only_loads = True
        try:
            compile_now()
        except jit.NotSaved:
            jit.on_thread.only_loads = False
            with _compiling:  # of calls at the same time, one starts a process
                compiles_elsewhere = _compile_elsewhere()
            if not compiles_elsewhere:
                compile_now()
    except Exception as error:  # calls continue without indexes, and report that
        _failure = error
        logger.info("numba's functions could not be compiled", exc_info=True)


def _forget_threads() -> None:
    """Begin anew in a forked process, which has none of the threads and processes."""
    global _compiling, _background, _child, _failure
    if _compiling.locked():  # so is a lock of numba's, which nobody will release here
        _failure = RuntimeError("the process was forked while its functions were loaded")
    _compiling, _background, _child = threading.Lock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


PATIENCE = 20.0
"""Seconds from which on steps give way to the process that compiles."""

MOMENT = 0.005
"""Seconds for which a step does so: about a seventh of a step's time on two cores."""

_IN_CHILD = "LOOKAHEAD_HF_COMPILING"
"""Set in the environment of the process that compiles, which starts no other."""

_CHILD = """\
import sys
sys.path[:] = filter(None, sys.path)  # a file here may be called signal.py
import contextlib, importlib, os, signal
sys.path[:] = {path!r}
signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at a prompt is not for it
with contextlib.suppress(OSError, AttributeError):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
from lookahead_hf import ngram_pool
for name in {modules!r}:
    importlib.import_module(name)
ngram_pool.compile_now()
"""


def _compile_elsewhere() -> bool:
    """Let another process compile and keep the functions on disk, where this one loads them later.

    A thread of this process would hold the interpreter's lock for most of its time: a call beside
    it takes ten times as long. The other process runs where cores are idle. It stays in the session
    of this one: Linux schedules a session of its own as a group, which steps wait for. If this
    process ends first, the other goes on and fills the disk for the next.

    Returns:
        Whether it compiles. It is started once: if it cannot compile or write, this one must.
    """
    global _child, _child_started
    if _child is not None:  # another call has just started it, or it has ended in vain
        return _child.poll() is None
    # The executable of a packaged program is the program.
    is_program = getattr(sys, "frozen", False) or not sys.executable
    if _IN_CHILD in os.environ or is_program:
        return False
    # Objects other than strings, such as paths, are ignored by imports.
    path, modules = [*map(str, sys.path)], [each.__module__ for each in _pending]
    try:
        _child = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=path, modules=modules)],
            env=os.environ | {_IN_CHILD: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _child_started = time.monotonic()
    except Exception as error:  # whatever forbids processes here
        logger.info("no process compiles numba's functions: %r", error)
    return _child is not None


def _is_installed() -> bool:
    if "numba" in sys.modules:
        return sys.modules["numba"] is not None
    return importlib.util.find_spec("numba") is not None

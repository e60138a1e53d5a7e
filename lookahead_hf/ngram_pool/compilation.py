"""Loads or compiles numba's functions without stalling a call, and knows when they are ready."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

PATIENCE = 20.0
"""Seconds after which steps begin to give way to the process that compiles."""

MOMENT = 0.005
"""Seconds for which a step gives way: about a seventh of its time on two cores."""

IDLE_SECONDS = 30.0
"""Seconds for which that process runs only where cores are idle."""

MOST_SECONDS = 120.0
"""Seconds after which that process is ended, and this one compiles."""

_IN_CHILD = "LOOKAHEAD_HF_COMPILING"
"""Set in the environment of the process that compiles, which starts no other."""

# Linux lets no process leave the idle priority again, so that a copy of the process takes it. What
# it has compiled by the time that it is ended is on disk.
_CHILD = """\
import sys
sys.path[:] = filter(None, sys.path)  # a file here may be called signal.py
import contextlib, importlib, os, signal, time
sys.path[:] = {path!r}
signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at a prompt is not for it

def compile_all():
    from lookahead_hf.ngram_pool import compilation
    for name in {modules!r}:
        importlib.import_module(name)
    compilation.{name}.compile_now()

if hasattr(os, "SCHED_IDLE"):
    copy = os.fork()
    if not copy:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        compile_all()
        sys.exit()
    end = time.monotonic() + {idle_seconds!r}
    while time.monotonic() < end:
        ended, status = os.waitpid(copy, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        if ended:
            sys.exit(status != 0)
        time.sleep(0.05)
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
compile_all()
"""


class NumbaMissingError(ImportError):
    """Drafting needs numba, which is missing or does not work."""

    def __init__(self, reason: BaseException | None = None) -> None:
        """Report the exception that was raised, None if numba was not found."""
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
    """Raise NumbaMissingError for whatever the import raises: numba fails in many ways."""
    try:
        yield
    except Exception as error:
        raise NumbaMissingError(error) from error


class Compilation:
    """Functions that numba has to compile, or to load from disk."""

    def __init__(self, name: str) -> None:
        """Take the object's own name in this module."""
        self.name = name
        self.pending: list[Callable[[], None]] = []
        self.lock = threading.Lock()  # held while functions are compiled or loaded here
        self.thread: threading.Thread | None = None
        self.child: subprocess.Popen[bytes] | None = None  # compiles what is not on disk
        self.child_started = 0.0  # in seconds of `time.monotonic`
        self.failure: Exception | None = None  # of the last attempt

    def register(self, warm_up: Callable[[], None]) -> None:
        """Add a function that calls all numba functions of a module once, with the real types."""
        self.pending.append(warm_up)

    def available(self) -> bool:
        """Return whether numba is installed and has not failed to compile."""
        return self.failure is None and _is_installed()

    def check_available(self) -> None:
        """Raise NumbaMissingError if numba is not installed or has failed to compile."""
        if not self.available():
            reason = getattr(self.failure, "reason", self.failure)
            raise NumbaMissingError(reason) from self.failure

    def compiled(self) -> bool:
        """Return whether all is compiled or loaded, so no call waits."""
        return not self.pending

    def ready(self) -> bool:
        """Return whether everything is compiled; if not, start to compile."""
        self.compile_in_background()
        return self.compiled()

    def compile_now(self) -> None:
        """Compile everything that is missing, or wait until another thread has done so.

        This takes some seconds once per installation and tenths of a second later: numba keeps
        compiled functions beside the package or, if that folder is read-only, in the user's cache
        folder (`NUMBA_CACHE_DIR` names another one). NumbaMissingError if numba cannot be imported.
        """
        with self.lock:
            try:
                while self.pending:
                    self.pending[0]()
                    del self.pending[0]
                self.failure = None
            except Exception as error:
                self.failure = error
                raise

    def wait_until_loaded(self, timeout: float) -> None:
        """Begin to load the functions unless that has begun; wait `timeout` seconds at most."""
        before = self.thread
        self.compile_in_background()
        if self.thread is not None and self.thread is not before:
            self.thread.join(timeout)

    def compile_in_background(self) -> None:
        """Begin to load or compile, unless that has begun, is done, or has failed."""
        if self.compiled() or not self.available() or self._is_busy():
            return
        # Not a daemon: a process that ends must not tear it out of LLVM's code.
        thread = threading.Thread(target=self._load_or_compile, name="lookahead-hf-compile")
        try:
            thread.start()
        except RuntimeError as error:  # there are too many threads, or the interpreter is ending
            self.failure = error
        else:
            self.thread = thread

    def give_way(self) -> None:
        """Leave the cores for a moment to the process that compiles, once it has worked for long.

        Otherwise steps without a pause, whose threads wait for each other, would keep it from
        running.
        """
        has_begun = self.child is not None
        if has_begun and time.monotonic() > self.child_started + PATIENCE and self._is_busy():
            time.sleep(MOMENT)

    def forget_threads(self) -> None:
        """Begin again in a forked process, which has none of the threads and processes."""
        if self.lock.locked():  # so is a lock of numba's, which nobody will release here
            self.failure = RuntimeError("the process was forked while its functions were loaded")
        self.lock, self.thread, self.child = threading.Lock(), None, None

    def _is_busy(self) -> bool:
        """Return whether the functions are being loaded or compiled, here or elsewhere."""
        is_loading = self.thread is not None and self.thread.is_alive()
        return is_loading or self._is_compiling_elsewhere()

    def _is_compiling_elsewhere(self) -> bool:
        is_overdue = time.monotonic() > self.child_started + MOST_SECONDS
        return self.child is not None and not is_overdue and self.child.poll() is None

    def _load_or_compile(self) -> None:
        """Load the functions; if one is not on disk, compile in another process, or else here."""
        try:
            with importing_numba():
                from lookahead_hf.ngram_pool import jit
            jit.on_thread.only_loads = True
            try:
                self.compile_now()
            except jit.NotSaved:
                jit.on_thread.only_loads = False
                with self.lock:  # of calls at the same time, one starts a process
                    compiles_elsewhere = self.compile_elsewhere()
                if not compiles_elsewhere:
                    self.compile_now()
        except Exception as error:  # calls continue without indexes, and report that
            self.failure = error
            logger.info("numba's functions could not be compiled", exc_info=True)

    def compile_elsewhere(self) -> bool:
        """Compile in another process, which keeps the functions on disk for this one to load.

        A thread of this process would hold the interpreter's lock for most of its time and make a
        call ten times as slow. The other process runs where cores are idle, and at normal priority
        if that took too long. It stays in this session: Linux schedules a session of its own as a
        group, which steps wait for. If this process ends first, the other goes on and fills the
        disk for the next.

        Returns whether it compiles. It is started once: if it cannot compile or write, this one
        must. RuntimeError if a signal has ended it, which would end this process, too.
        """
        if self.child is not None:  # started just now, or ended in vain, or too slow
            if self._is_compiling_elsewhere():
                return True
            status = self.child.poll()
            if status is None:
                self.child.kill()
            elif status < 0 and status != -signal.SIGKILL:  # which may be our own
                raise RuntimeError(f"signal {-status} ended the process that compiled")
            return False
        # The executable of a packaged program is the program.
        is_program = getattr(sys, "frozen", False) or not sys.executable
        if _IN_CHILD in os.environ or is_program:
            return False
        # Objects other than strings, such as paths, are ignored by imports.
        path, modules = [*map(str, sys.path)], [each.__module__ for each in self.pending]
        given = {"path": path, "modules": modules, "name": self.name}
        program = _CHILD.format(**given, idle_seconds=IDLE_SECONDS)
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-c", program],
                env=os.environ | {_IN_CHILD: "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self.child_started = time.monotonic()
        except Exception as error:  # whatever forbids processes here
            logger.info("no process compiles numba's functions: %r", error)
        return self.child is not None


def _is_installed() -> bool:
    if "numba" in sys.modules:
        return sys.modules["numba"] is not None
    return importlib.util.find_spec("numba") is not None


of_process = Compilation("of_process")
"""The functions of drafting."""

of_kernels = Compilation("of_kernels")
"""The kernels for a CPU, which are compiled after them."""

of_float16 = Compilation("of_float16")
"""Those for float16 numbers, which few models have."""

if hasattr(os, "register_at_fork"):
    for _each in (of_process, of_kernels, of_float16):
        os.register_at_fork(after_in_child=_each.forget_threads)

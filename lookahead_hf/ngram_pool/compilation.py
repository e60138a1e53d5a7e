"""Loads numba's functions between and within calls, after another process has compiled them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lookahead_hf.utils import warn_caller

PIECE_SECONDS = 0.05
"""Time after which a step loads no more functions; one function takes up to 0.1 seconds."""

POLL_SECONDS = 0.05  # Time between two looks at whether the other process has compiled something

AWAITED = "--awaited"
"""Tells the process that compiles that somebody waits for it, so that it need not yield."""


class NumbaMissingError(ImportError):
    """Drafting needs numba, which is missing or does not work."""

    def __init__(self, reason: BaseException | None = None) -> None:
        """Report the exception that was raised, None if numba was not found."""
        self.reason = reason
        is_missing = reason is None or getattr(reason, "name", None) == "numba"
        error = f"{type(reason).__name__}: {reason}"
        why = "is not installed" if is_missing else f"does not work here ({error})"
        remedy = "`pip install numba` installs a version that fits the other packages"
        if isinstance(reason, CompilingError):
            why, remedy = f"has compiled nothing ({reason})", "`lookahead-hf compile` tries again"
        super().__init__(f"drafting needs numba, which {why}: {remedy}")


class CompilingError(RuntimeError):
    """The process that compiles could not start, or has ended without result."""


@contextmanager
def importing_numba() -> Iterator[None]:
    """Raise NumbaMissingError for whatever the import raises: numba fails in many ways."""
    try:
        yield
    except Exception as error:
        raise NumbaMissingError(error) from error


class Child:
    """A process that compiles groups of functions; it ends with this one."""

    def __init__(self, names: Sequence[str], is_awaited: bool = False) -> None:
        """Start it, or raise CompilingError; if somebody waits for it, it yields to nobody."""
        # The executable of a packaged program is the program.
        if getattr(sys, "frozen", False) or not sys.executable:
            raise CompilingError("a packaged program has no interpreter to start")
        # Objects other than strings, such as paths, are ignored by imports.
        path = os.pathsep.join(each for each in sys.path if isinstance(each, str))
        self._said: str | None = None  # in the end
        try:
            with tempfile.TemporaryFile() as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "lookahead_hf.compile", *[AWAITED] * is_awaited, *names],
                    env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.PIPE,  # which ends with this process, whatever ends it
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
                self._errors = os.fdopen(os.dup(errors.fileno()), "rb")
        except Exception as error:  # whatever forbids processes here
            raise CompilingError(f"no process can be started: {error}") from error

    def end(self) -> str | None:
        """Return the last line that it wrote, or its status, after it has ended; else None."""
        status = self._process.poll()
        if self._said is None and status is not None:
            with self._errors, self._process:
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines()
            how = f"with status {status}" if status >= 0 else f"by signal {-status}"
            is_said = lines and status >= 0
            self._said = lines[-1] if is_said else f"the process that compiles ended {how}"
        return self._said


class Functions:
    """A group of functions that another process compiles, and this one loads piece by piece."""

    def __init__(self, name: str) -> None:
        """Take the name by which `lookahead_hf.compile` knows the group."""
        self.name = name
        self.pending: list[Callable[[], object]] = []
        self.failure: Exception | None = None
        self.child: Child | None = None  # which compiles them
        self._lock = threading.Lock()  # held while functions are loaded

    def register(self, *pieces: Callable[[], object]) -> None:
        """Add pieces: each calls some of the functions once, with the real types."""
        self.pending += pieces

    def is_loaded(self) -> bool:
        """Return whether everything is loaded, so that no call waits."""
        return not self.pending

    def is_available(self) -> bool:
        """Return whether nothing has failed, so far as it was tried."""
        return self.failure is None

    def check_available(self) -> None:
        """Raise NumbaMissingError if something has failed."""
        if self.failure is not None:
            reason = getattr(self.failure, "reason", self.failure)
            raise NumbaMissingError(reason) from self.failure

    def ready(self, seconds: float = PIECE_SECONDS) -> bool:
        """Return whether everything is loaded; if not, load for some time, or have it compiled.

        A step waits for this, but never for the process that compiles.
        """
        if self.pending and self.is_available() and self._lock.acquire(blocking=False):
            try:
                self._advance(time.monotonic() + seconds)
            except Exception as error:
                self.fail(error)
            finally:
                self._lock.release()
        return not self.pending

    def is_on_disk(self) -> bool:
        """Return whether all is compiled, by whichever process; NumbaMissingError without numba."""
        return any(self._mark(root).exists() for root in _jit().folders())

    def compile(self) -> None:
        """Compile what is missing, in a process that does nothing else; leave a mark on disk."""
        assert _jit().may_compile
        mark = self._mark(_jit().writable())  # of these sources, whatever happens to them meanwhile
        for piece in self.pending:
            piece()
        mark.touch()

    def require(self) -> None:
        """Wait until the functions can be called; NumbaMissingError if that is impossible."""
        if self.pending and not _jit().may_compile and not self.is_on_disk():
            wait([self])
            self.check_available()

    def fail(self, error: Exception) -> None:
        """Give up: calls go on without the functions, and a warning says so."""
        self.failure = error
        try:
            self.check_available()
        except NumbaMissingError as why:
            warn_of(why)

    def retry(self) -> None:
        self.failure, self.child = None, None

    def forget_threads(self) -> None:
        """Begin again in a forked process, which has none of the threads and processes."""
        if self._lock.locked():  # so is a lock of numba's, which nobody will release here
            self.failure = RuntimeError("the process was forked while its functions were loaded")
        self._lock, self.child = threading.Lock(), None

    def _mark(self, root: Path | None) -> Path:
        return Path(_jit().folder_of(root), _jit().key_of(self.name))

    def _advance(self, end: float) -> None:
        """Load until a time, or look after the process that compiles."""
        end_of_child = None if self.child is None else self.child.end()  # before the look
        if not self.is_on_disk():
            if end_of_child is not None:
                raise CompilingError(end_of_child)
            self.child = self.child or Child([self.name])
            return
        try:
            _jit().prepare()
            while self.pending and time.monotonic() < end:
                self.pending[0]()
                del self.pending[0]
        except _jit().NotCompiledError as error:
            for root in _jit().folders():  # it is to be compiled again
                self._mark(root).unlink(missing_ok=True)
            if self.child is not None:  # and just has been
                raise CompilingError(str(error)) from error


def request(
    groups: Sequence[Functions], is_between_calls: bool = False, is_awaited: bool = False
) -> None:
    """Have one process compile what is not on disk of some groups, in this order.

    Between calls there is time to prepare numba. `is_awaited`: somebody waits for the process.
    """
    wanted = [each for each in groups if each.pending and each.child is None]
    wanted = [each for each in wanted if each.is_available()]
    try:
        missing = [each for each in wanted if not each.is_on_disk()]
        child = Child([each.name for each in missing], is_awaited) if missing else None
        for each in missing:
            each.child = child
        if is_between_calls and wanted:
            _jit().prepare()
    except Exception as error:
        for each in wanted:
            each.fail(error)


def wait(groups: Sequence[Functions], seconds: float = math.inf) -> None:
    """Wait, for some seconds at most, until groups are loaded, in this order, or have failed."""
    request(groups, is_awaited=True)
    end = time.monotonic() + seconds
    for each in groups:
        while not each.ready() and each.is_available():
            if time.monotonic() >= end:
                return
            if not each.is_on_disk():
                time.sleep(POLL_SECONDS)


def warn_of(error: NumbaMissingError) -> None:
    """Warn once per process that calls go on without compiled functions."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warn_caller(f"calls decode plainly, or without kernels: {error}", RuntimeWarning)


_has_warned = False


def _jit() -> ModuleType:
    """Return the module that loads functions; NumbaMissingError if numba cannot be imported."""
    with importing_numba():
        from lookahead_hf.ngram_pool import jit
    return jit


drafting = Functions("drafting")  # The functions of drafting
common = Functions("common")  # The kernels for a CPU that serve all dtypes

kernels = {
    name: Functions(name)
    for name in ("bfloat16", "float32", "float16", "bfloat16_amx", "bfloat16_loops")
}
"""The kernels for a CPU that compute layers, by the name of the dtype, and of what multiplies tiles
where products are not made by vectors."""

GROUPS = {each.name: each for each in (common, *kernels.values(), drafting)}  # All groups by name

if hasattr(os, "register_at_fork"):
    for _each in GROUPS.values():
        os.register_at_fork(after_in_child=_each.forget_threads)

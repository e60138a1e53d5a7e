"""Runs compiled code on the threads that torch's own operations use.

Torch's threads are those of the OpenMP library in its process. They wait for work between
operations, so a second set of threads would share the cores with them. `GOMP_parallel`, which
compilers call for every parallel loop, gives work to the same threads. Without it (Windows, macOS)
the kernels run only if torch has one thread.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

_LIBRARIES = ("libgomp", "libiomp5", "libomp")


@cache
def _parallel() -> Callable[..., None] | None:
    """Return the `GOMP_parallel` of the OpenMP library that torch has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in own_first({line.split(maxsplit=5)[5] for line in lines if line.count("/")}):
        function: Callable[..., None] | None = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            function.restype = None  # type: ignore[attr-defined]
            arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.argtypes = arguments  # type: ignore[attr-defined]
            return function
    return None


def own_first(paths: Iterable[str]) -> list[str]:
    """Return the OpenMP libraries among files, those installed with torch first.

    Other packages bring libraries of their own, whose threads are not torch's.
    """
    import torch

    home = Path(torch.__file__).resolve().parent
    own = home / "lib", home.with_name("torch.libs")
    found = [path for path in paths if Path(path).name.startswith(_LIBRARIES)]
    return sorted(found, key=lambda path: (Path(path).parent not in own, path))


def has_torchs_threads() -> bool:
    """Return whether compiled code can run on as many threads as torch's operations do."""
    return num_threads() == 1 or _parallel() is not None


def num_threads() -> int:
    """Return the number of threads of torch's operations."""
    import torch

    return torch.get_num_threads()


_ARCH_PRCTL, _REQUEST, _GET, _TILE_DATA = 158, 0x1023, 0x1022, 18


@cache
def may_use_tiles() -> bool:
    """Ask Linux once per process to let threads use the tiles of AMX; return whether it does.

    The permission is the process's: threads that exist already have it, and so do children by fork
    (not by exec). oneDNN asks in the same way when it first multiplies. Linux refuses if a thread
    has an alternate signal stack that is too small for the larger frame, and a sandbox may, too.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    granted, libc = ctypes.c_uint64(0), ctypes.CDLL(None)
    libc.syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    libc.syscall(_ARCH_PRCTL, _GET, ctypes.byref(granted))
    return bool(granted.value >> _TILE_DATA & 1)


@cache
def _alone(entry: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)


def run(entry: int, job: int, threads: int) -> None:
    """Call `entry`, the address of a `void (int64)`, with a job on every thread; wait for all."""
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        _alone(entry)(job)
    else:
        parallel(entry, job, threads, 0)

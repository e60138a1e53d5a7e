"""Where the package keeps files between runs, and how it replaces them."""

from __future__ import annotations

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

YOUNG_SECONDS = 60
"""Age below which a part of a file is kept."""


def cache_root() -> Path:
    """Return the folder of everything that is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lookahead_hf"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder, which replaces `path` once it is on the disk.

    Parts that killed writers have left behind are removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        _remove_if_left(left)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it; where there are no locks, go on without it."""
    with path.open("ab") as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock(file: BinaryIO) -> bool:
    """Lock a file as long as this process has it open; return False if another one has it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_left(part: Path) -> None:
    """Remove a part of a file if its writer is gone and it is therefore unlocked.

    A part younger than a minute stays: its writer may not have locked it yet, or its file system
    may have no locks.
    """
    with suppress(OSError):
        if time.time() - part.stat().st_mtime < YOUNG_SECONDS:
            return
        with part.open("rb") as file:
            if _lock(file):
                part.unlink()

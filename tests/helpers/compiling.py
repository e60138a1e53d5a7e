"""Numba's compilation in the hands of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lookahead_hf.ngram_pool import compilation


@contextmanager
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What there is to compile, in place of our functions; nothing has failed yet."""
    pending: list[Callable[[], None]] = []
    for name, value in {"_pending": pending, "_modules": [], "_failure": None}.items():
        monkeypatch.setattr(compilation, name, value)
    monkeypatch.setattr(compilation, "_background", None)
    yield pending
    settle()


def settle() -> None:
    """Wait for what compiles in the background."""
    if compilation._background is not None:
        compilation._background.join()

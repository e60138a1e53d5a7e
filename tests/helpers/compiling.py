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
    monkeypatch.setattr(compilation, "_pending", pending)
    for name in ("_background", "_child", "_failure"):
        monkeypatch.setattr(compilation, name, None)
    yield pending
    settle()


def settle() -> None:
    """Wait for what compiles in the background."""
    if compilation._background is not None:
        compilation._background.join()

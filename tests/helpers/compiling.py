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
    monkeypatch.setattr(compilation.of_process, "pending", pending)
    for name in ("thread", "child", "failure"):
        monkeypatch.setattr(compilation.of_process, name, None)
    yield pending
    settle()


def settle() -> None:
    """Wait for what compiles in the background."""
    if (thread := compilation.of_process.thread) is not None:
        thread.join()

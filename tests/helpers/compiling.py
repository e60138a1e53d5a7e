"""Numba's compilation in the hands of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions


class Elsewhere:
    """A process that compiles, as far as this one can see."""

    def __init__(self, names: Any = ()) -> None:
        self.names = list(names)
        self.status: str | None = None

    def end(self) -> str | None:
        return self.status


@contextmanager
def nothing_compiled(
    monkeypatch: pytest.MonkeyPatch, group: Functions = compilation.drafting
) -> Iterator[list[Callable[[], object]]]:
    """What there is to load in place of our functions, on disk from the start; none has failed."""
    pending: list[Callable[[], object]] = []
    state: dict[str, Any] = {"pending": pending, "failure": None, "child": None}
    for name, value in state.items():
        monkeypatch.setattr(group, name, value)
    monkeypatch.setattr(group, "is_on_disk", lambda: True)
    monkeypatch.setattr(compilation, "_has_warned", False)
    yield pending

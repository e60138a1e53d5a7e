"""Graphs on the CPU, for the tests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lookahead_hf.runner.cuda import graphs
from tests.helpers.device import TapeRecorder, taped
from tests.helpers.replayed import WIDTHS


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapeRecorder]]:
    """The recorders of a test, one per call that asks for graphs; few of them record anything."""
    monkeypatch.setattr(graphs, "WIDTHS", WIDTHS)
    with taped(monkeypatch) as recorders:
        yield recorders

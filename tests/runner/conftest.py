"""Graphs on the CPU, in the tests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lookahead_hf.runner.cuda import graphs
from tests.helpers.device import TapeRecorder, taped
from tests.helpers.replayed import WIDTHS


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapeRecorder]]:
    """What records the steps of calls in a test: one per set of graphs, and per look at it."""
    monkeypatch.setattr(graphs, "WIDTHS", WIDTHS)
    with taped(monkeypatch) as recorders:
        yield recorders

"""The model of most tests of continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.queue.session import QueueSession
from tests.helpers import models
from tests.helpers.requests import DRAFTED


@pytest.fixture(scope="module")
def model() -> Any:
    return lookahead_hf.enable(models.tiny("llama"), default=DRAFTED)


class Live(list[int]):
    """How many rows decode in every step of a queue, and what is called as the sixth one begins."""

    sixth: Callable[[], object] = staticmethod(lambda: None)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    counts, launch = Live(), QueueSession.launch

    def counted(self: Any, draft: Any) -> Any:
        counts.append(int(self.rows.live.sum()))
        if len(counts) == 6:
            counts.sixth()
        return launch(self, draft)

    monkeypatch.setattr(QueueSession, "launch", counted)
    return counts

"""Programs of benchmarks/ import their neighbours by their bare names, and so do these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.tiny_chat import save_tiny_chat


@pytest.fixture(scope="session", autouse=True)
def on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in a folder."""
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))

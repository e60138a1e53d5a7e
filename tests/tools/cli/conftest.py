"""A tiny model in a folder, a way to run commands, and an empty folder in which each test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookahead_hf.tools.cli import main
from tests.helpers.commands import Run, Said
from tests.helpers.tiny_chat import save_tiny_chat


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, code: int = 0) -> Said:
        assert main(words) == code, words
        return Said(*capsys.readouterr())

    return call


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

"""Every example runs from its file, without a network."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_chat import save_tiny_chat

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/[!_]*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat(tmp_path_factory.mktemp("model"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    example: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), "--model", str(folder)])
    monkeypatch.syspath_prepend(str(example.parent))
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.strip()
    assert "identical: False" not in shown

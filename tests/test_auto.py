"""Programs that do not import the package run with speculation by `lookahead_hf.auto`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tqdm

import lookahead_hf

SOURCE = """
import sys
from transformers import GenerationMixin
import beside
print(__name__, sys.argv[1:], GenerationMixin.generate.__module__, beside.FOUND)
print("lookahead_hf.hook" in sys.modules and GenerationMixin.generate is
      sys.modules["lookahead_hf.hook"]._everywhere)
"""

SPECULATING = """
import lookahead_hf
from tests.helpers.calls import run
from tests.helpers.models import tiny
model = tiny("llama")
for settings in ({}, {"speculative": False}, {"speculative": True}):
    run(model, **settings)
    stats = lookahead_hf.last_stats(model)
    print(stats is not None and stats.fallback_reason is None)
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "program.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("FOUND = True")
    (tmp_path / "generates.py").write_text(SPECULATING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("beside", None)
    lookahead_hf.disable_everywhere()


def imported(monkeypatch: pytest.MonkeyPatch, switch: str = "") -> Any:
    """The module, as a process finds it that has this switch in its environment."""
    monkeypatch.setenv("LOOKAHEAD_HF", switch)
    monkeypatch.delitem(sys.modules, "lookahead_hf.auto", raising=False)
    return importlib.import_module("lookahead_hf.auto")


def assert_ran(shown: str) -> None:
    first, second = shown.splitlines()
    assert first.startswith("__main__ ['--gen_kwargs', 'speculative=True']")
    assert first.endswith("True") and second == "True"


def test_a_file() -> None:
    command = [sys.executable, "-m", "lookahead_hf.auto", "program.py"]
    root = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command += ["--gen_kwargs", "speculative=True"]
    done = subprocess.run(command, env=os.environ | root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_ran(done.stdout)


def test_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    imported(monkeypatch).run_program(["program", "--gen_kwargs", "speculative=True"])
    assert_ran(capsys.readouterr().out)


def test_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        imported(monkeypatch).run_program(["tqdm", "--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{tqdm.__version__}\n"


@pytest.mark.parametrize(
    ("variable", "words", "speculates"),
    [("", (), False), ("1", (), True), ("recycling", (), True), ("", ("--speculative",), True)],
)
def test_one_switch_makes_every_model_speculate(
    variable: str,
    words: tuple[str, ...],
    speculates: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    imported(monkeypatch, variable).run_program([*words, "generates.py"])
    assert capsys.readouterr().out.split() == [str(speculates), "False", "True"]


@pytest.mark.parametrize("words", ["", "--speculative", "--fast program.py"])
def test_no_program(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="^usage: "):
        imported(monkeypatch).run_program(words.split())


def test_a_switch_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="LOOKAHEAD_HF=yes: set it to 1, 0 or a preset"):
        imported(monkeypatch, "yes")

"""Programs that do not import the package run with speculation by `lookahead_hf.auto`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
import sys
from transformers import GenerationMixin
import beside
print(__name__, sys.argv[1:], GenerationMixin.generate.__module__, beside.FOUND)
print("lookahead_hf.hook" in sys.modules and GenerationMixin.generate is
      sys.modules["lookahead_hf.hook"]._everywhere)
"""

SPECULATING = """
import lookahead_hf.auto
from tests.helpers.calls import run
from tests.helpers.models import tiny
model = tiny("llama")
for settings in ({}, {"speculative": False}, {"speculative": True}):
    run(model, **settings)
    stats = lookahead_hf.last_stats(model)
    print(stats is not None and stats.fallback_reason is None)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lookahead_hf.auto", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    (tmp_path / "program.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("FOUND = True")
    return tmp_path


@pytest.mark.parametrize("name", ["program.py", "program"])
def test_a_file_and_a_module(folder: Path, name: str) -> None:
    done = run(folder, name, "--gen_kwargs", "speculative=True")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("__main__ ['--gen_kwargs', 'speculative=True']")
    assert first.endswith("True") and second == "True"


def test_a_command(folder: Path) -> None:
    done = run(folder, "pytest", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pytest ")


@pytest.mark.parametrize(
    ("variable", "words", "speculates"),
    [("", (), False), ("1", (), True), ("recycling", (), True), ("", ("--speculative",), True)],
)
def test_one_switch_makes_every_model_speculate(
    variable: str,
    words: tuple[str, ...],
    speculates: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF", variable)
    (folder / "generates.py").write_text(SPECULATING)
    done = run(folder, *words, "generates.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(speculates), "False", "True"]


WRONG = {
    "": "usage: ",
    "--speculative": "usage: ",
    "--fast program.py": "usage: ",
    "nothing.py": "there is no file nothing.py",
    "nothing": "there is no program nothing: PROGRAM is",
    "nothing.within --help": "there is no program nothing.within: PROGRAM is",
}
"""Words that name no program, and what is said about them."""

TRYING = """
import sys
from lookahead_hf.auto import run_program
for words in sys.argv[1:]:
    try:
        run_program(words.split())
    except SystemExit as end:
        print(str(end).splitlines()[0])
"""


def test_no_program(folder: Path) -> None:
    assert run(folder).returncode == 1
    command = [sys.executable, "-c", TRYING, *WRONG]
    tried = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    for said, shown in zip(tried.stdout.splitlines(), WRONG.values(), strict=True):
        assert said.startswith(shown)


def test_a_switch_that_is_not_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_HF", "yes")
    assert "LOOKAHEAD_HF=yes: set it to 1, 0 or a preset" in run(folder, "program").stderr

"""The process that compiles: one at a time per folder, and no longer than its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lookahead_hf.compile import NICENESS
from lookahead_hf.ngram_pool.compilation import AWAITED

pytest.importorskip("numba")

PROGRAM = """
import os, sys, time, types
from pathlib import Path
for name in ("lookahead_hf.drafting.registry", "lookahead_hf.engines.cpu.kernels.program"):
    sys.modules[name] = types.ModuleType(name)  # there is only this to compile:
from lookahead_hf import compile
from lookahead_hf.ngram_pool import compilation

def note(what):
    with open("notes", "a") as notes:
        notes.write(f"{what} ")

def piece():
    sys.path.insert(0, os.getcwd())
    import toy
    note("begins")
    time.sleep(float(sys.argv[1]))
    toy.double(3)
    note(sum(toy.double.stats.cache_hits.values()))
    note(f"ends {os.nice(0)}\\n")

compilation.GROUPS["toy"] = compilation.Functions("toy")
compilation.GROUPS["toy"].register(piece)
compile.main(sys.argv[2:])
"""

TOY = """
from lookahead_hf.ngram_pool.jit import jit

@jit
def double(x):
    return 2 * x
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def compiling(seconds: float = 0.0, *awaited: str) -> subprocess.Popen[str]:
    """A process that takes this long to compile."""
    command = [sys.executable, "-c", PROGRAM, str(seconds), *awaited, "toy"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True)


def test_two_processes_compile_one_after_the_other(tmp_path: Path) -> None:
    processes = [compiling(0.5), compiling(0.5, AWAITED)]
    for process in processes:
        with process:
            assert process.wait(120) == 0
    first, second = (line.split() for line in Path("notes").read_text().strip().splitlines())
    assert first[:3] == ["begins", "0", "ends"]
    assert second[:3] == ["begins", "1", "ends"]  # it finds what the first has compiled
    yields = min(19, os.nice(0) + NICENESS)
    assert {int(first[3]), int(second[3])} == {os.nice(0), yields}  # nobody waits for one of them
    assert len([*tmp_path.glob("kept/*/toy-*.compiled")]) == 1


def test_it_ends_with_the_pipe_of_its_parent() -> None:
    with compiling(60) as process:
        while not Path("notes").exists():
            assert process.poll() is None
            time.sleep(0.05)
        begin = time.monotonic()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) != 0
        assert time.monotonic() - begin < 30
    assert Path("notes").read_text() == "begins "


def test_where_nothing_else_can_be_written_it_uses_a_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    for found in ("0", "1"):
        with compiling() as process:
            assert process.wait(120) == 0
        assert Path("notes").read_text().strip().splitlines()[-1].split()[1] == found
    (place,) = tmp_path.glob("lookahead_hf-*")
    assert place.stat().st_mode & 0o077 == 0 and [*place.rglob("toy-*.compiled")]


def test_a_failure_is_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("raise ValueError('a toy that is broken')")
    with compiling() as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(120) == 1
    assert said.splitlines()[-1] == "toy: ValueError: a toy that is broken"
    assert not [*tmp_path.glob("kept/*/*.compiled")]

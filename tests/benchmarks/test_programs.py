"""Every program of benchmarks/ runs without a GPU and writes what it measured."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import numba
import numpy
import pytest
import torch
import transformers
import triton

from lookahead_hf import SpeculativeConfig, kernels
from lookahead_hf.engines.cuda.capture import Recording
from lookahead_hf.engines.cuda.graphs import GraphSet
from lookahead_hf.tools.cli import measuring
from tests.helpers.device import taped
from tests.helpers.served import save_ascii_chat, serving

ROOT = Path(__file__).parents[2]
RUNS = ("one", "two", "three")
OPTIONS = {
    "end_to_end": ["--batch 2 --sample 0.7,0.95", "--everywhere --picture {tmp}/picture.svg"],
    "drafters": ["--texts {tmp}/texts --nodes 4,8 --picture {tmp}/picture.svg --on-model"],
    "race": ["{tmp}/picture.svg"],
    "sources": ["pool", "assistant --assistant {folder}"],
    "launches": ["", "--products"],
    "sweep": ["--nodes 0"],
}
SLOW = ("first_minutes", "memory")  # They start processes
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text("utf-8") and path.stem != "served_load"
)


def run_program(name: str, tmp: Path, options: str) -> list[dict[str, Any]]:
    """Run a program with `--dry` in this process; return the lines of its report."""
    report = tmp / "report.json"
    words = [name, "--dry", "--json", str(report), *options.split()]
    with mock.patch.object(sys, "argv", words), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a program shows them and goes on
        importlib.import_module(name).main()
    return json.loads(report.read_text())["lines"] if report.exists() else []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, each, marks=pytest.mark.slow if name in SLOW else ())
        for name in PROGRAMS
        for each in OPTIONS.get(name, [""])
    ],
)
def test_every_program_runs(
    name: str, options: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny model writes neither lines nor names, so the old file is its text.
    same = {"same": lambda text, rng: text}
    monkeypatch.setattr(importlib.import_module("prediction"), "KINDS", same)
    options = f"--model {folder} {options.format(folder=folder, tmp=tmp_path)}"
    lines = run_program(name, tmp_path, options)
    if "picture.svg" in options:
        assert ElementTree.parse(tmp_path / "picture.svg").getroot()[3:]
    assert lines or name == "race"
    for line in lines:
        assert not any(value <= 0 for value in line.values() if isinstance(value, float)), line
        assert line.get("identical", 1.0) == line.get("equal", 16) / 16 == 1.0
        assert line.get("bits") is not False


def test_the_load_of_a_server(tmp_path: Path) -> None:
    for name in ("fastapi", "uvicorn", "openai", "prometheus_client"):
        pytest.importorskip(name)
    folder = save_ascii_chat(tmp_path)
    with serving(folder, SpeculativeConfig()) as served:
        options = f"--model {folder} --ports {served.port} --new-tokens 8"
        (line,) = run_program("served_load", tmp_path, options)
    assert line["tokens_per_second"] > 0 and 0 < line["median_first"] <= line["longest_first"]


def test_a_text_that_parts_elsewhere_than_at_a_near_tie_fails_the_benchmark(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of every speculative text is replaced by another."""
    whole = measuring.timed_call

    def changed(model: object, arguments: dict[str, Any], seed: int) -> measuring.Call:
        call = whole(model, arguments, seed)
        if not arguments.get("speculative"):
            return call
        rows = tuple((*row[:5], (row[5] + 1) % 100, *row[6:]) for row in call.rows)
        return replace(call, rows=rows)

    monkeypatch.setattr(measuring, "timed_call", changed)
    with pytest.raises(SystemExit, match="BUG"):
        run_program("end_to_end", tmp_path, f"--model {folder} --no-cache-only")


def test_a_familys_speed_is_all_its_tokens_by_all_its_seconds() -> None:
    def run(system: str, seconds: list[float], num_tokens: int) -> measuring.Run:
        calls = [measuring.Call(s, (tuple(range(num_tokens)),), num_tokens) for s in seconds]
        return measuring.Run("qa", system, calls)

    runs = [run("plain", [9.0, 1.0, 1.0], 10), run("plain", [3.0, 3.0, 3.0], 30)]
    runs += [run("other", [0.5, 0.5, 0.5], 10), run("other", [0.5, 0.5, 0.5], 30)]
    plain, other = (line for line in measuring.summarize(runs) if line.family == "qa")
    assert (plain.tokens, plain.tokens_per_second) == (40, 10.0)
    assert (other.tokens_per_second, other.ratio, other.identical) == (40.0, 4.0, 1.0)


def test_a_line_that_fails_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls, common = map(importlib.import_module, ("calls", "common"))
    report = common.Report(SimpleNamespace(json=tmp_path / "report.json"))
    report.add(calls.Line("tiny", 1, "plain"), lambda: [][0])
    report.add(calls.Line("tiny", 1, "ours"), lambda: {"first": 0.25})
    report.end(may_fail=True)
    with pytest.raises(SystemExit, match="1 of 2"):
        report.end()
    failed, measured = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert failed["ran"].startswith("IndexError: list index") and measured["first"] == 0.25
    assert "| tiny | 1 | plain |  |" in capsys.readouterr().out


def test_only_the_replay_counts_as_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing and uploading a draft are the host's, while the device may be idle."""
    outside: Any = importlib.import_module("outside")
    order: list[str] = []
    event = SimpleNamespace(record=lambda: order.append("event"))
    graph = SimpleNamespace(replay=lambda: order.append("replay"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    with outside.timed_forwards(True) as spans:
        Recording(graph, ()).replay()
    assert order == ["event", "replay", "event"] and len(spans) == 1


def test_steps_without_nodes_know_what_layers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that shows less than its room would be compared otherwise."""
    step: Any = importlib.import_module("step")
    model = step.load("tiny", None, torch.float32, torch.device("cpu"))
    bench, tried = step.Bench(model, 1, 40, rounds=1), []
    monkeypatch.setattr(GraphSet, "try_masks", lambda *_: tried.append(1))
    with torch.no_grad(), taped(monkeypatch), bench.stepping(0, True, on_device=True) as run:
        run.step()
    assert tried


def run_on_gpu(name: str, results: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "benchmarks/gpu.sh", name, str(results)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_run_on_a_gpu_ends_in_time(run: str, tmp_path: Path) -> None:
    """A machine may be lent for ten minutes; first comes what the rest waits for."""
    done = run_on_gpu(run, tmp_path, PLAN="1", MODEL="/any")
    caps = re.findall(r"^== (\w+), at most (\d+) s$", done.stdout, re.MULTILINE)
    tests = [int(seconds) for name, seconds in caps if name.endswith("_tests")]
    others = [int(seconds) for name, seconds in caps if not name.endswith("_tests")]
    # The tests run at the same time; what runs too long may take five seconds to end.
    assert sum(others) + max(tests, default=0) + 5 * len(others) <= 530
    assert not [*tmp_path.iterdir()]
    names = [name for name, _ in caps]
    assert names[0] == "versions" and len(names) > 3
    if run == "one":
        kinds = "kernels", "attention", "graphs", "random"
        assert {*names[1:5]} == {f"{kind}_tests" for kind in kinds}


def test_a_run_on_a_gpu_begins_with_what_the_machine_has(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\n')  # no programs
    python.chmod(0o755)
    done = run_on_gpu("three", tmp_path / "results", PYTHON=str(python))
    assert done.returncode == 0, done.stdout
    (kept,) = (tmp_path / "results").glob("gpu_three_*.tar")
    with tarfile.open(kept) as files:
        said = files.extractfile("./versions.txt") or pytest.fail("no file")
        versions, device, is_compiled, bonus, backend = said.read().decode().splitlines()[-5:]
    modules = (torch, triton, transformers, numba, numpy)
    assert versions.split() == [module.__version__ for module in modules]
    # What numba compiles returns 2, and so does the verification of an empty draft.
    assert device.startswith("2 ") and (is_compiled, bonus) == ("True", "2")
    assert backend == kernels.backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.slow
def test_what_runs_on_a_gpu_is_rehearsed(tmp_path: Path) -> None:
    done = run_on_gpu("--rehearse", tmp_path, PYTHON=sys.executable, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
    tars = sorted(tmp_path.iterdir())
    assert {path.name.split("_")[1] for path in tars} == {*RUNS}
    measured: dict[str, int] = {}
    for path in tars:
        with tarfile.open(path) as files:
            for member in files.getnames():
                if member.endswith(".json"):
                    report = json.load(files.extractfile(member) or pytest.fail(member))
                    measured[Path(member).stem] = len(report["lines"])
    parts = "launches step outside calls calls_large end_to_end attention kernels sweep products"
    parts += " step_long step_batches"
    assert {*parts.split()} == measured.keys()
    assert all(measured.values())

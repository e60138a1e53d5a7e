"""Programs that measure steps and kernels run without a GPU and write their measurements."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy
import pytest
import torch
import transformers
import triton

from lookahead_hf import kernels
from lookahead_hf.engines.cuda.capture import Recording
from lookahead_hf.engines.cuda.graphs import GraphSet
from tests.helpers.benchmark_runs import ROOT, lines_of, printed, run_program
from tests.helpers.device import taped

RUNS = ("one", "two", "three")


def test_kernels(tmp_path: Path) -> None:
    sizes = "--vocab 1009 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --context 64"
    options = f"--device cpu --rounds 1 {sizes} --rotate 1"
    lines = run_program("kernels", tmp_path, options)
    names = "verify_tree verify_tree reject_tree topk_rows topk_rows compact_path tree_attention"
    assert " ".join(line["name"].split()[0] for line in lines) == names
    assert lines[-1]["bits"] is True  # in Triton's interpreter
    assert all(line["twin"] > 0 and line["plain"] > 0 and line["floor"] > 0 for line in lines)
    assert all(line["call"] is None for line in lines)


def test_kernels_by_their_settings(tmp_path: Path) -> None:
    sizes = "--vocab 101 --heads 2 --kv-heads 1 --head-dim 16 --context 64 --top-k 4 --nodes 0"
    options = f"--device cpu --dtype float32 --rounds 1 {sizes}"
    lines = run_program("sweep", tmp_path, options)
    assert [line["name"].partition(" as it is")[1] for line in lines].count(" as it is") == 2
    assert len(lines) == 15 + 10 and all(line["call"] > 0 for line in lines)


def test_a_line_that_fails_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls, lines = map(importlib.import_module, ("calls", "lines"))
    report = lines.Report(tmp_path / "report.json")
    report.add(calls.Line("tiny", 1, "plain"), lambda: [][0])
    report.add(calls.Line("tiny", 1, "ours"), lambda: {"first": 0.25})
    report.end(may_fail=True)
    with pytest.raises(SystemExit, match="1 of 2"):
        report.end()
    failed, measured = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert failed["ran"].startswith("IndexError: list index") and measured["first"] == 0.25
    assert "| tiny | 1 | plain |  |" in capsys.readouterr().out


def test_outside(tmp_path: Path) -> None:
    (line,) = lines_of("outside", tmp_path, "--nodes 3 --context 32 --new-tokens 40")
    assert line["steps"] > 0 and line["tokens_per_step"] >= 1.0
    assert line["forward"] > 0
    assert line["step"] == pytest.approx(line["forward"] + line["outside"])


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


def test_structured(folder: str) -> None:
    options = f"--model {folder} --device cpu --dtype bfloat16 --cases 2 --new-tokens 12"
    said = printed("structured", options).strip().splitlines()
    head, rule, *lines = [line.split("|")[1:-1] for line in said]
    assert len(lines) == 4 and all(len(line) == len(head) == len(rule) for line in lines)
    assert all(float(line[2]) == 1.0 and float(line[4]) > 1.0 for line in lines)


def test_calls(tmp_path: Path) -> None:
    options = "--shapes tiny --device cpu --dtype float32 --rounds 1 --context 32"
    lines = run_program("calls", tmp_path, f"{options} --rows 1,2 --new-tokens 16")
    names = ["plain", "ours", "plain sampled", "ours sampled"]
    single = [*names[:2], "prompt lookup", *names[2:], "static"]
    assert [line["system"] for line in lines] == [*names, "ours queue", *single]
    assert all(line["tokens_per_second"] > 0 and line["first"] > 0 for line in lines)
    assert {line["equal"] for line in lines} == {16}  # texts are plain's, in float32
    assert all(line["tokens_per_step"] > 1 for line in lines if line["system"] == "ours")


def test_step(tmp_path: Path) -> None:
    lines = lines_of("step", tmp_path, "--nodes 0,4 --batch 1,2 --context 32")
    systems = ("eager", "ours", "ours compiled")
    places = [(rows, nodes, s) for rows in (1, 2) for nodes in (0, 4) for s in systems]
    assert [(line["rows"], line["nodes"], line["system"]) for line in lines] == places
    assert all(line["milliseconds"] > 0 and line["floor"] > 0 for line in lines)
    of_ours = ["compiled", "eager", "model"]
    assert sorted({line["ran"].partition(",")[0] for line in lines}) == of_ours


def test_launches(tmp_path: Path) -> None:
    options = "--shapes tiny --device cpu --dtype float32 --rounds 1"
    lines = run_program("launches", tmp_path, f"{options} --nodes 0,3 --context 32")
    assert {line["tokens"] for line in lines if line["name"] == "all"} == {1, 4}
    products = {line["tokens"]: line["launches"] for line in lines if line["name"] == "aten::mm"}
    assert products == {1: 15, 4: 15}  # of two layers and a head
    lines = run_program("launches", tmp_path, f"{options} --products")
    assert len(lines) == 7 * 8
    assert all(line["gigabytes_per_second"] > 0 for line in lines)


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
        assert {*names[1:4]} == {"kernels_tests", "attention_tests", "graphs_tests"}


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

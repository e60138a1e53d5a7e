"""benchmarks/step.py runs where there is no GPU, and writes what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]


def test_on_cpu(tmp_path: Path) -> None:
    models.tiny("llama").save_pretrained(tmp_path / "tiny")
    report, figure = tmp_path / "step.json", tmp_path / "step.svg"
    options = f"--model {tmp_path / 'tiny'} --device cpu --dtype float32 --nodes 0,4 --batch 1,2"
    done = subprocess.run(
        [sys.executable, "benchmarks/step.py", *options.split(), "--context", "32"]
        + ["--rounds", "1", "--json", str(report), "--plot", str(figure)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(report.read_text())["lines"]
    places = [(rows, nodes, s) for rows in (1, 2) for nodes in (0, 4) for s in ("eager", "ours")]
    assert [(line["rows"], line["nodes"], line["system"]) for line in lines] == places
    assert all(line["milliseconds"] > 0 and line["floor"] > 0 for line in lines)
    assert all(
        0 < line["twins"] < line["milliseconds"] for line in lines if line["system"] == "ours"
    )
    assert "<svg" in figure.read_text()

"""benchmarks/outside.py runs where there is no GPU, and writes what it measured."""

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
    report, figure = tmp_path / "outside.json", tmp_path / "outside.svg"
    options = f"--model {tmp_path / 'tiny'} --device cpu --dtype float32 --nodes 3 --context 32"
    done = subprocess.run(
        [sys.executable, "benchmarks/outside.py", *options.split(), "--new-tokens", "40"]
        + ["--rounds", "1", "--json", str(report), "--plot", str(figure)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(report.read_text())["lines"]
    assert line["steps"] > 0 and line["tokens_per_step"] >= 1.0
    assert line["forward"] > 0 and line["outside"] > 0
    assert line["step"] == pytest.approx(line["forward"] + line["outside"])
    assert "<svg" in figure.read_text()

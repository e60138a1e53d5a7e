"""Runs a program of benchmarks/ as its users do, on a tiny model without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import models

ROOT = Path(__file__).parents[2]


def printed(name: str, options: str) -> str:
    """Run `benchmarks/<name>.py` with these options; return what it prints."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *options.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_program(name: str, folder: Path, options: str) -> list[dict[str, Any]]:
    """Run a program with these options; return the lines of its report."""
    report = folder / f"{name}.json"
    printed(name, f"{options} --json {report}")
    lines: list[dict[str, Any]] = json.loads(report.read_text())["lines"]
    return lines


def lines_of(name: str, folder: Path, options: str) -> list[dict[str, Any]]:
    """Run a program on a tiny model and return its lines.

    `options` are its own, beside those for model, device, dtype, rounds and files.
    """
    models.tiny("llama").save_pretrained(folder / "tiny")
    shared = f"--model {folder / 'tiny'} --device cpu --dtype float32 --rounds 1"
    return run_program(name, folder, f"{shared} {options}")

"""Runs a program of benchmarks/ by its command line, in this process, on a tiny model."""

from __future__ import annotations

import io
import json
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.helpers import models

ROOT = Path(__file__).parents[2]


def printed(name: str, options: str) -> str:
    """Run `benchmarks/<name>.py` with these options; return what it prints."""
    file, said, threads = ROOT / "benchmarks" / f"{name}.py", io.StringIO(), torch.get_num_threads()
    with (
        mock.patch.object(sys, "argv", [str(file), *options.split()]),
        redirect_stdout(said),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # a program shows them and goes on
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
    return said.getvalue()


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

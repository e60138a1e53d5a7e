"""benchmarks/kernels.py runs without a GPU and writes its measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--vocab 1009 --rounds 1 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --context 64"


@pytest.mark.parametrize("rotate", [0, 1])
def test_on_cpu(tmp_path: Path, rotate: int) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/kernels.py", "--device", "cpu", *SMALL.split()]
        + ["--rotate", str(rotate), "--json", str(report)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(report.read_text())["lines"]
    assert [line["name"].split()[0] for line in lines] == [
        "verify_tree",
        "verify_tree",
        "reject_tree",
        "topk_rows",
        "topk_rows",
        "compact_path",
        "tree_attention",
    ]
    assert all(line["twin"] > 0 and line["plain"] > 0 and line["floor"] > 0 for line in lines)
    assert all(line["call"] is None for line in lines)

"""benchmarks/outside.py runs without a GPU and writes its measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.benchmark_runs import lines_of


def test_on_cpu(tmp_path: Path) -> None:
    (line,) = lines_of("outside", tmp_path, "--nodes 3 --context 32 --new-tokens 40")
    assert line["steps"] > 0 and line["tokens_per_step"] >= 1.0
    assert line["forward"] > 0
    assert line["step"] == pytest.approx(line["forward"] + line["outside"])

"""The benchmark of n-grams measures every line."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = "pool"


def test_every_line_is_measured(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "CONTEXTS", (500, 5_000))
    benchmark.main(["--pool-tokens", "50000", "--looks", "5", "--json", str(tmp_path / "out")])
    lines = json.loads((tmp_path / "out").read_text())["lines"]
    by_name = {(line["what"], line["size"]): line for line in lines}
    trees = ["propose: n-grams, recycling", "propose: and a pool", "observe"]
    assert {(what, size) for what in trees for size in (500, 5_000)} < set(by_name)
    assert {"fill a pool", "open a pool", "look-up, opened pool", "tree, pool"} < {
        w for w, _ in by_name
    }
    assert all(0 < line["best"] < 1e6 for line in lines)
    memory = next(line for line in lines if line["unit"] == "bytes/token")
    assert 20 < memory["best"] < 45

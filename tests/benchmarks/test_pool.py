"""The benchmark of n-grams measures every line, and its linear scan finds the right match."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PROGRAM = "pool"


def test_every_line_is_measured(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "CONTEXTS", (500, 5_000))
    benchmark.main(["--pool-tokens", "50000", "--looks", "5", "--json", str(tmp_path / "out")])
    lines = json.loads((tmp_path / "out").read_text())["lines"]
    by_name = {(line["what"], line["size"]): line for line in lines}
    parts = ["compiled", "propose"]
    trees = [f"{part}: {names}" for part in parts for names in ("n-grams, recycling", "and a pool")]
    trees += ["observe", "KMP scan (10 tokens)", "HF prompt lookup (10)"]
    assert {(what, size) for what in trees for size in (500, 5_000)} < set(by_name)
    assert {"fill a pool", "open a pool", "look-up, opened pool", "tree, pool"} < {
        w for w, _ in by_name
    }
    assert all(0 < line["best"] < 1e6 for line in lines)
    memory = next(line for line in lines if line["unit"] == "bytes/token")
    assert 20 < memory["best"] < 45


def test_the_scan_follows_the_first_occurrence_of_the_longest_suffix() -> None:
    drafting = importlib.import_module("pool_drafting")
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = rng.integers(0, 3, rng.integers(1, 30)).astype(np.int32)
        expected: list[int] = []
        for length in range(min(4, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            found = np.flatnonzero((windows == text[-length:]).all(1))
            if len(found):
                expected = text[found[0] + length :][:10].tolist()
                break
        assert drafting.scan(text, 4, 10).tolist() == expected

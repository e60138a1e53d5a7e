"""benchmarks/step.py runs without a GPU and writes its measurements."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.benchmark_runs import lines_of

SYSTEMS = ("eager", "ours", "ours packed")


def test_on_cpu(tmp_path: Path) -> None:
    lines = lines_of("step", tmp_path, "--nodes 0,4 --batch 1,2 --context 32")
    places = [(rows, nodes, s) for rows in (1, 2) for nodes in (0, 4) for s in SYSTEMS]
    assert [(line["rows"], line["nodes"], line["system"]) for line in lines] == places
    assert all(line["milliseconds"] > 0 and line["floor"] > 0 for line in lines)
    assert [line["twins"] is not None for line in lines] == [
        s.startswith("ours") for *_, s in places
    ]

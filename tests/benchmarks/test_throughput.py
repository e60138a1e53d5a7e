"""The throughput benchmark runs its systems on the same prompts and counts what they feed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = "throughput"


def test_batches_and_queues(
    benchmark: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", folder, "--families", "qa,translation", "--static", "2"]
    words += ["--slots", "2", "--prompts", "4", "--new-tokens", "12", "--rounds", "1"]
    benchmark.main([*words, "--json", str(tmp_path / "out.json")])
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    by_name = {(line["setting"], line["family"], line["system"]): line for line in lines}
    for family in ("qa", "translation", "all"):
        plain = by_name["static", family, benchmark.PLAIN]
        ours = by_name["static", family, benchmark.OURS]
        assert plain["ratio"] == 1.0
        assert ours["tokens"] == plain["tokens"]
        assert 0 < ours["forwards"] <= plain["forwards"]
        assert 0 < ours["useful"] <= ours["fed"]
    queue = [line for line in lines if line["setting"] == "queue"]
    systems = [line["system"] for line in queue]
    assert systems == [benchmark.PLAIN, benchmark.THEIRS, benchmark.NO_DRAFTS, benchmark.OURS]
    assert len({line["tokens"] for line in queue}) == 1
    assert all(0 < line["useful"] <= line["fed"] for line in queue)
    assert capsys.readouterr().out.count("| queue | mixed | 2 |") == len(queue)


def test_padding_is_what_serves_no_row(benchmark: ModuleType) -> None:
    work = benchmark.Work("static", "qa", 2, [[1, 2, 3], [1]])
    # Both rows are fed 3 columns and then 2 tokens each; the second text ends one step before.
    measured = benchmark.Measured(2.0, [(5, 6, 7), (5, 6)], 3, 10, 3 + 1 + 2 + 1)
    faster = benchmark.Measured(1.0, [(5, 6, 7), (5, 6)], 3, 7, 7)
    plain, ours = benchmark.lines_of(
        work, {"plain": [measured], "ours": [measured, faster, faster]}
    )
    assert (plain.ratio, ours.ratio) == (1.0, 2.0)
    assert (plain.padding, ours.padding) == (pytest.approx(0.3), 0.0)

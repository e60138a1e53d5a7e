"""Programs that measure steps and kernels run without a GPU and write their measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.benchmark_runs import lines_of, run_program


@pytest.mark.parametrize("rotate", [0, 1])
def test_kernels(tmp_path: Path, rotate: int) -> None:
    sizes = "--vocab 1009 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --context 64"
    options = f"--device cpu --rounds 1 {sizes} --rotate {rotate}"
    lines = run_program("kernels", tmp_path, options)
    names = "verify_tree verify_tree reject_tree topk_rows topk_rows compact_path tree_attention"
    assert " ".join(line["name"].split()[0] for line in lines) == names
    assert all(line["twin"] > 0 and line["plain"] > 0 and line["floor"] > 0 for line in lines)
    assert all(line["call"] is None for line in lines)


def test_outside(tmp_path: Path) -> None:
    (line,) = lines_of("outside", tmp_path, "--nodes 3 --context 32 --new-tokens 40")
    assert line["steps"] > 0 and line["tokens_per_step"] >= 1.0
    assert line["forward"] > 0
    assert line["step"] == pytest.approx(line["forward"] + line["outside"])


def test_step(tmp_path: Path) -> None:
    lines = lines_of("step", tmp_path, "--nodes 0,4 --batch 1,2 --context 32")
    systems = ("eager", "ours", "ours packed")
    places = [(rows, nodes, s) for rows in (1, 2) for nodes in (0, 4) for s in systems]
    assert [(line["rows"], line["nodes"], line["system"]) for line in lines] == places
    assert all(line["milliseconds"] > 0 and line["floor"] > 0 for line in lines)
    assert [line["twins"] is not None for line in lines] == [s != "eager" for *_, s in places]

"""The end-to-end benchmark runs all its systems and adds them up as it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lookahead_hf.tools.cli import measuring
from tests.helpers.tiny_chat import DRAFTING

PROGRAM = "end_to_end"


@pytest.mark.parametrize("batch", [1, 2])
def test_all_systems_are_compared(
    benchmark: ModuleType,
    folder: str,
    tmp_path: Path,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways = {**measuring.systems(batch), measuring.OURS: {"speculative": DRAFTING}}
    monkeypatch.setattr(benchmark, "systems", lambda size: ways)
    words = ["--model", folder, "--families", "qa,translation", "--prompts-per-family", "2"]
    words += ["--rounds", "2", "--new-tokens", "40", "--batch", str(batch)]
    benchmark.main([*words, "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr().out
    assert shown.count("| identical, 4 of 4 |") == 2 * 2  # both rounds of two texts a family
    assert shown.count("| identical, 8 of 8 |") == 2  # ours with and without drafts, all families
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    by_name = {(line["family"], line["system"]): line for line in lines}
    systems = {system for _, system in by_name}
    assert systems == {"plain", "speculative", "budget 0"} | (
        {"HF prompt lookup"} if batch == 1 else set()
    )
    assert by_name["all", "plain"]["texts"] == 4
    assert by_name["all", "plain"]["ratio"] == 1.0
    assert by_name["all", "speculative"]["identical"] == 1.0
    assert by_name["all", "speculative"]["tokens_per_step"] > 1.0
    assert by_name["all", "budget 0"]["tokens_per_step"] == 1.0


@pytest.mark.parametrize("is_near", [True, False])
def test_a_text_that_parts_elsewhere_than_at_a_near_tie_fails_the_benchmark(
    benchmark: ModuleType,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_near: bool,
) -> None:
    """A token of every speculative text is replaced by another, which a bound may excuse."""
    whole = measuring.timed_call

    def changed(model: object, arguments: dict[str, Any], seed: int) -> measuring.Call:
        call = whole(model, arguments, seed)
        if not arguments.get("speculative"):
            return call
        rows = tuple((*row[:5], (row[5] + 1) % 100, *row[6:]) for row in call.rows)
        return replace(call, rows=rows)

    monkeypatch.setattr(measuring, "timed_call", changed)
    monkeypatch.setattr(measuring, "MOST_ULPS", 10**9 if is_near else 4)
    monkeypatch.setattr(measuring, "SHIFTS", (0, 10**9))
    words = ["--model", folder, "--families", "qa", "--prompts-per-family", "2", "--rounds", "1"]
    words += ["--new-tokens", "8", "--no-cache-only"]
    if is_near:
        benchmark.main(words)
    else:
        with pytest.raises(SystemExit, match="BUG"):
            benchmark.main(words)
    said = "parts at near ties only" if is_near else "BUG: parts beyond near ties"
    assert f"| {said}, 2 of 2" in capsys.readouterr().out


def test_a_familys_speed_is_all_its_tokens_by_all_its_seconds(benchmark: ModuleType) -> None:
    def run(system: str, seconds: list[float], num_tokens: int) -> object:
        calls = [measuring.Call(s, (tuple(range(num_tokens)),), num_tokens) for s in seconds]
        return benchmark.Run("qa", system, calls)

    runs = [run("plain", [9.0, 1.0, 1.0], 10), run("plain", [3.0, 3.0, 3.0], 30)]
    runs += [run("other", [0.5, 0.5, 0.5], 10), run("other", [0.5, 0.5, 0.5], 30)]
    plain, other = (line for line in benchmark.summarize(runs) if line.family == "qa")
    assert (plain.tokens, plain.tokens_per_second) == (40, 10.0)
    assert (other.tokens_per_second, other.ratio, other.identical) == (40.0, 4.0, 1.0)


def test_an_unknown_family_is_answered_with_the_known_ones(benchmark: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no family named poetry; there are: chat, code"):
        benchmark.common.read_prompts(["poetry"])

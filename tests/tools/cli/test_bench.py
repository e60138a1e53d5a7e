"""`lookahead-hf bench`: three systems on the user's prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_hf.tools.cli import measuring
from tests.helpers.commands import Run
from tests.helpers.tiny_chat import DRAFTING

SYSTEMS = ["plain", "HF prompt lookup", "speculative"]


def words(folder: str, *more: str) -> list[str]:
    return ["bench", "--model", folder, "--rounds", "1", "--new-tokens", "32", *more]


@pytest.mark.parametrize("size", [1, 2])
def test_lines_of_a_file_are_prompts(size: int, folder: str, run: Run) -> None:
    Path("mine.txt").write_text("abc abc abc\n\nabcd\nleft out\n")
    more = ["--config", json.dumps(DRAFTING), "--batch-size", str(size)]
    found = run(*words(folder, "--prompts", "mine.txt", "--limit", "2", "--json", *more)).result
    assert found["about"]["dtype"] == "float32"
    assert [line["system"] for line in found["lines"]] == (SYSTEMS if size == 1 else SYSTEMS[::2])
    plain, *_, ours = found["lines"]
    assert {line["family"] for line in found["lines"]} == {"mine.txt"}
    assert (plain["texts"], plain["ratio"], plain["tokens_per_step"]) == (2, 1.0, 1.0)
    assert ours["identical"] == 1.0 and ours["tokens_per_step"] > 1.0


def test_records_are_prompts(folder: str, run: Run) -> None:
    records = '{"asked": {"text": "abc abc"}}\n\n{"asked": {"text": "abcd"}}\n'
    Path("mine.jsonl").write_text(records)
    assert "2 of 2" in run(*words(folder, "--prompts", "mine.jsonl", "--field", "asked.text")).out


def test_without_a_file_the_demos_prompts_are_taken(folder: str, run: Run) -> None:
    shown = run(*words(folder))
    assert all(name in shown.out for name in ("code edit", "all", *SYSTEMS))
    assert "measuring" in shown.err


def test_an_interrupted_run_shows_what_there_is(
    folder: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    Path("mine.txt").write_text("abc abc\nabcd\n")
    whole = measuring.timed_call
    calls: list[object] = []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3 + 3 + 2:  # warm-up, the first prompt, half of the second
            raise KeyboardInterrupt
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "timed_call", interrupted)
    shown = run(*words(folder, "--prompts", "mine.txt"))
    assert "interrupted" in shown.err and shown.out.count("1 of 1") == 3

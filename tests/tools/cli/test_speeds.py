"""`lookahead-hf bench` and `analyze`: systems and settings on the user's prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.tools.cli import measuring
from lookahead_hf.tools.cli.commands import speeds
from lookahead_hf.tools.cli.measuring import PLAIN, Call, summarize
from tests.helpers.commands import Run
from tests.helpers.tiny_chat import DRAFTING

SYSTEMS = ["plain", "HF prompt lookup", "speculative"]
COPY = {"group": "copy", "prompt": "the cat sat on the mat, said he"}
NEW = {"group": "new", "prompt": "abc"}


def written(file: str, *records: dict[str, Any]) -> str:
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def words(folder: str, *more: str) -> list[str]:
    return ["bench", "--model", folder, "--rounds", "1", "--new-tokens", "32", *more]


@pytest.mark.parametrize("size", [1, 2])
def test_lines_of_a_file_are_prompts(size: int, folder: str, run: Run) -> None:
    Path("mine.txt").write_text("abc abc abc\n\nabcd\nleft out\n")
    more = ["--config", json.dumps(DRAFTING), "--batch-size", str(size)]
    found = run(*words(folder, "--prompts", "mine.txt", "--sample", "2", "--json", *more)).result
    assert found["about"]["dtype"] == "float32"
    lines = [line for line in found["lines"] if line["family"] == "all prompts"]
    assert [line["system"] for line in lines] == (SYSTEMS if size == 1 else SYSTEMS[::2])
    plain, *_, ours = lines
    assert (plain["texts"], plain["ratio"], plain["tokens_per_step"]) == (2, 1.0, 1.0)
    assert ours["identical"] == 1.0 and ours["tokens_per_step"] > 1.0


def test_an_interrupted_run_shows_what_there_is(
    folder: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    whole = measuring.timed_call
    calls: list[object] = []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3 + 3 + 2:  # warm-up, the first prompt, half of the second
            raise KeyboardInterrupt
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "timed_call", interrupted)
    shown = run(*words(folder))
    assert "interrupted" in shown.err and "code edit, plain" in shown.out  # of the demo's prompts
    assert shown.out.count("1 of 1") == 2 * 3
    calls[:] = [()]  # five calls of the first group, half of the second
    shown = run("analyze", written("l.jsonl", COPY, NEW), "--model", folder, "--new-tokens", "16")
    assert "interrupted" in shown.err and "copy: " in shown.out and "new: " not in shown.out


def test_settings_are_measured_on_the_model(folder: str, run: Run) -> None:
    file = written("log.jsonl", COPY, COPY, NEW)
    given = ["analyze", file, "--model", folder, "--new-tokens", "16"]
    found = run(*given, "--json").result
    lines = {(line["family"], line["system"]): line for line in found["lines"]}
    assert {system for _, system in lines} == {PLAIN, *speeds.SETTINGS}
    assert lines["copy", "no drafts"]["tokens_per_step"] == 1.0
    # The same prompt again: the text of the first is known.
    assert lines["copy", "learning pool"]["tokens_per_step"] > 1.0
    assert [each["group"] for each in found["groups"]] == ["copy", "new"]
    shown = run(*given).out
    assert "copy, learning pool" in shown and "speculative=" in shown and "copy: " in shown


@pytest.mark.parametrize(
    ("seconds", "verdict", "use"),
    [
        ({}, "not worth it", "speculative=False"),
        ({"default": 0.95}, "hardly worth it", "speculative=SpeculativeConfig()"),
        ({"default": 0.5, "prompt lookup": 0.49}, "worth it", "speculative=SpeculativeConfig()"),
        (
            {"default": 0.5, "learning pool": 0.25},
            "worth it, though a text may change the speed of other users' texts",
            'speculative=SpeculativeConfig(drafters=("ngram", "recycling", "pool"), learn=True)',
        ),
    ],
)
def test_the_advice_follows_from_the_speeds(
    seconds: dict[str, float], verdict: str, use: str
) -> None:
    calls = {name: [Call(seconds.get(name, 1.0), ((5, 6),))] for name in (PLAIN, *speeds.SETTINGS)}
    lines = summarize([measuring.Run("mine", *call) for call in calls.items()])
    found = {"group": "mine", "verdict": verdict, "use": use}
    assert speeds.finding("mine", lines) == found


def test_a_mistake_in_the_file_is_told_before_anything_is_imported_or_loaded() -> None:
    file = Path("log.jsonl").absolute()
    file.write_text('{"prompt": "a"}\n{"promt": ""}\n')
    code = (
        "import sys\n"
        "from lookahead_hf.tools.cli import main\n"
        f"assert main(['analyze', {str(file)!r}, '--model', 'nowhere']) == 1\n"
        "assert not {'torch', 'transformers', 'numba'} & {*sys.modules}\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "log.jsonl, line 2 has neither" in done.stderr


def test_prompts_are_read_in_all_their_forms() -> None:
    lines, asked = Path("lines"), [{"role": "user", "content": "a"}]
    lines.write_text('a\n \n {"prompt": "b", "group": "c"}\n' + json.dumps({"messages": asked}))
    assert speeds.read_prompts(lines, 9) == {"all prompts": ["a", asked], "c": ["b"]}
    written("log.jsonl", *[{"prompt": str(number), "group": number % 2} for number in range(20)])
    found = speeds.read_prompts(Path("log.jsonl"), 3)
    assert found == {"0": ["0", "6", "12"], "1": ["1", "7", "13"]}  # spread over the whole file

"""`lookahead-hf analyze`: what a few settings bring for the user's prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.stats import SpeculativeStats
from lookahead_hf.tools.cli.measuring import PLAIN, Call
from lookahead_hf.tools.cli.prompts import UNGROUPED, Sample, read_samples
from lookahead_hf.tools.cli.report import SETTINGS, Measured, findings
from lookahead_hf.tools.cli.screen import CommandError
from tests.helpers.commands import Run

COPY = {"group": "copy", "prompt": "the cat sat on the mat, said he"}
NEW = {"group": "new", "prompt": "abc"}


def written(file: str, *records: dict[str, Any]) -> str:
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_settings_are_measured_on_the_model(folder: str, run: Run) -> None:
    words = [written("log.jsonl", COPY, COPY, NEW), "--model", folder, "--new-tokens", "16"]
    found = run("analyze", *words, "--html", "report.html", "--json").result
    copy, new = found["groups"]
    assert (copy["group"], copy["texts"], new["group"], new["texts"]) == ("copy", 2, "new", 1)
    assert 1 < copy["output_tokens"] <= 16
    assert set(copy["speeds"]) == set(SETTINGS)
    for each in copy["speeds"].values():
        assert each["lowest"] <= each["ratio"] <= each["highest"]
        assert each["tokens_per_step"] >= 1.0
        ratio = each["tokens_per_second"] / copy["plain_tokens_per_second"]
        assert ratio == pytest.approx(each["ratio"])
    assert copy["speeds"]["no drafts"]["tokens_per_step"] == 1.0
    # The same prompt again: the text of the first is known.
    assert copy["speeds"]["learning pool"]["tokens_per_step"] > 1.0
    assert 0 < copy["prefill_share"] <= 1
    assert found["about"]["machine"]["dtype"] == "float32"
    html = Path("report.html").read_text()
    assert "copy: " in html and "speculative=" in html
    assert "src=" not in html and "href=" not in html


def measured(group: str, prompt: str, output: str, **seconds: float) -> Measured:
    """A prompt whose calls took so long; by default all took a second."""
    stats = SpeculativeStats(rows=1, num_emitted=len(output), prefill_ms=100.0)
    rows = (tuple(map(ord, output)),)
    calls = {
        name: Call(seconds.get(name.replace(" ", "_"), 1.0), rows, 1, stats)
        for name in (PLAIN, *SETTINGS)
    }
    return Measured(group, [*map(ord, prompt)], calls)


@pytest.mark.parametrize(
    ("seconds", "verdict", "use"),
    [
        ({}, "not worth it", "speculative=False"),
        ({"default": 0.5}, "worth it", "speculative=SpeculativeConfig()"),
        ({"default": 0.95}, "hardly worth it", "speculative=SpeculativeConfig()"),
        ({"default": 0.5, "prompt_lookup": 0.49}, "worth it", "speculative=SpeculativeConfig()"),
        (
            {"default": 0.5, "prompt_lookup": 0.4},
            "worth it",
            'speculative=SpeculativeConfig(drafters=("ngram",))',
        ),
        (
            {"default": 0.5, "learning_pool": 0.25},
            "worth it",
            'speculative=SpeculativeConfig(drafters=("ngram", "recycling", "pool"), learn=True)',
        ),
    ],
)
def test_the_advice_follows_from_the_speeds(
    seconds: dict[str, float], verdict: str, use: str
) -> None:
    (found,) = findings([measured("", "abc", "abcdefgh", **seconds)])
    assert (found.verdict, found.advice) == (verdict, use)
    assert ("other users" in found.why) == ("learn=True" in use)
    assert found.prefill_share == pytest.approx(0.1)


def test_reasons_are_named() -> None:
    texts = [
        measured(
            "copy", "the cat sat on the mat, said he", "the cat sat on the mat", no_drafts=2.0
        ),
        measured("new", "abc", "ZYXWVUTSRQPONMLKJIHG"),
        measured("again", "abc", "ZYXWVUTSRQPONMLKJIHG"),
    ]
    copy, new, again = findings(texts)
    # The first three tokens are no part of a known 4-gram.
    assert copy.repeats == {
        "the prompt": 19 / 22, "the text itself": 0.0, "earlier texts": 0.0, "nothing": 3 / 22,
    }  # fmt: skip
    assert "86% repeat the prompt" in copy.why and "reaches 0.50 times" in copy.why
    assert new.repeats["nothing"] == 1.0 and "earlier guesses" in new.why
    assert again.repeats["earlier texts"] > 0.5


def test_a_report_for_people(folder: str, run: Run) -> None:
    file = written("my log.jsonl", COPY)
    shown = run("analyze", file, "--model", folder, "--new-tokens", "8")
    assert "What speculation brings for my log.jsonl" in shown.out
    assert "Speed-ups by setting: default " in shown.out and "speculative=" in shown.out
    assert "up to 8 new tokens" in shown.out
    assert "measuring" in shown.err


def test_a_mistake_in_the_file_is_told_before_anything_is_imported_or_loaded() -> None:
    file = Path("log.jsonl").absolute()
    file.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
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


def asked_in(file: Path, limit: int) -> list[str]:
    return [sample.messages[0]["content"] for sample in read_samples(file, limit)]


def test_prompts_are_read_in_all_their_forms() -> None:
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    file, lines = Path("log.jsonl"), Path("lines")
    written("log.jsonl", {"messages": [asked, answered]}, {"messages": [asked], "family": 5})
    assert read_samples(file, 9) == [
        Sample(UNGROUPED, (asked,)),
        Sample("5", (asked,)),
    ]
    lines.write_text("a\n \nb\n")
    assert asked_in(lines, 9) == ["a", "b"]
    lines.write_text('a\n {"prompt": "b", "group": "c"}\n["e"]\n')
    assert [each.group for each in read_samples(lines, 9)] == [UNGROUPED, "c", UNGROUPED]
    written("log.jsonl", *[{"prompt": str(number), "group": number % 2} for number in range(20)])
    taken = asked_in(file, 3)
    assert taken == ["0", "1", "6", "7", "12", "13"]  # three of each group, over the whole file
    with pytest.raises(CommandError, match="UTF-8"):
        file.write_bytes(b"\xff\n")
        read_samples(file, 9)

"""`lookahead-hf analyze`: predictions for the user's prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.cli.analysis.prompts import UNGROUPED, Sample, read_samples
from lookahead_hf.cli.screen import CommandError
from tests.helpers.commands import Run

COPY = {
    "group": "copy",
    "prompt": "the cat sat on the mat, said he",
    "output": "the cat sat on the mat",
}
NEW = {"group": "new", "prompt": "abc", "output": "ZYXWVUTSRQPONMLKJIHG"}
FLAT = ["--references", "--costs", "0:1,64:1"]


def written(file: str, *records: dict[str, Any]) -> str:
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_outputs_are_replayed_without_the_model(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lookahead_hf.cli.analyze.open_model")
    file = written("log.jsonl", COPY, NEW, {**NEW, "output": None})
    found = run("analyze", file, "--model", folder, *FLAT, "--json").result
    copy, new = found["groups"]
    assert (copy["group"], copy["texts"], new["group"], new["texts"]) == ("copy", 1, "new", 1)
    assert copy["output_tokens"] == 23  # bytes, and the end of the text
    # The first three tokens and the end of the text are no part of a known 4-gram.
    assert copy["repeats"] == {
        "the prompt": 19 / 23, "the text itself": 0.0, "earlier texts": 0.0, "nothing": 4 / 23,
    }  # fmt: skip
    default = copy["expected"]["default"]
    assert default["tokens_per_step"] > 3.0
    # Where a step costs the same whatever it drafts, that is the speed-up.
    assert default["speed_up"] == pytest.approx(default["tokens_per_step"])
    assert copy["verdict"] == "worth it" and new["verdict"] != "worth it"
    assert (copy["use"], new["use"]) == ("speculative=SpeculativeConfig()", "speculative=False")
    assert new["repeats"]["nothing"] == 1.0
    assert new["expected"]["no drafts"]["speed_up"] == 1.0
    assert found["about"]["machine"] is None


def test_a_pool_that_learns_is_advised_where_texts_repeat_each_other(folder: str, run: Run) -> None:
    file = written("log.jsonl", *[NEW] * 6)
    (group,) = run("analyze", file, "--model", folder, *FLAT, "--json").result["groups"]
    assert group["repeats"]["earlier texts"] > 0.5
    assert group["best"] == "learning pool"
    assert group["use"].endswith('drafters=("ngram", "recycling", "pool"), learn=True)')
    assert "other users" in group["why"]


@pytest.mark.parametrize("more", [[], ["--references"]])
def test_costs_are_measured_on_the_model(folder: str, run: Run, more: list[str]) -> None:
    words = [written("log.jsonl", COPY, COPY, NEW), "--model", folder, "--new-tokens", "16", *more]
    found = run("analyze", *words, "--html", "report.html", "--json").result
    copy, new = found["groups"]
    assert (copy["texts"], new["texts"]) == (2, 1)
    assert copy["recycles"] and 1 < copy["output_tokens"] <= 16
    for each in copy["expected"].values():
        assert each["speed_up"] > 0 and each["tokens_per_step"] >= 1.0
        ratio = each["tokens_per_second"] / copy["plain_tokens_per_second"]
        assert ratio == pytest.approx(each["speed_up"])
    assert found["about"]["machine"]["dtype"] == "float32"
    html = Path("report.html").read_text()
    assert "copy: " in html and "speculative=" in html
    assert "src=" not in html and "href=" not in html


def test_a_page_that_cannot_be_written_is_told_first(run: Run) -> None:
    words = [written("log.jsonl", COPY), "--model", "./nothing", "--html", "nowhere/report.html"]
    assert "No such file" in run("analyze", *words, code=2).err


def test_a_report_for_people(folder: str, run: Run) -> None:
    file = written("my log.jsonl", COPY)
    shown = run("analyze", file, "--model", folder, *FLAT)
    assert "83% repeat the prompt" in shown.out
    assert "speculative=SpeculativeConfig()" in shown.out
    assert f"lookahead-hf bench --model {folder}" in shown.out and f"'{file}'" in shown.out
    assert "tokens/s" not in shown.out and "The model did not run." in shown.out
    assert "replaying" in shown.err


@pytest.mark.parametrize(
    ("name", "content", "more", "message"),
    [
        ("none.txt", None, [], "cannot be read"),
        ("empty.jsonl", "\n\n", [], "has no prompt"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt"', [], "line 3 is not JSON"),
        ("a.jsonl", "[1]", [], "line 1 is not a JSON object"),
        ("a.jsonl", '{"text": "a"}', [], "neither a text `prompt` nor a list `messages`"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', [], "neither a text `prompt`"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', [], "no question"),
        ("a.txt", 'a prompt\n{"prompt": "b"', [], "line 2 is not JSON"),
        ("a.txt", '{"prompt": "b"}\na\n{"promt": "b"}', [], "line 3 has neither a text `prompt`"),
        ("a.jsonl", '{"prompt": "b", "output": 5}', [], "line 1 has an output that is no text: 5"),
        ("a.jsonl", "a prompt", [], "line 1 is not JSON"),
        ("a.txt", "a prompt", ["--references"], "holds no outputs"),
        ("a.txt", "a prompt", ["--costs", "assumed"], "--costs needs --references"),
        ("a.txt", "a prompt", ["--costs", "1:1"], "write pairs such as 0:1"),
        ("a.txt", "a prompt", ["--costs", "0:0"], "write pairs such as 0:1"),
        ("a.txt", "a prompt", ["--costs", "cheap"], "write pairs such as 0:1"),
    ],
)
def test_what_cannot_be_analysed_is_one_message(
    name: str, content: str | None, more: list[str], message: str, run: Run
) -> None:
    if content is not None:
        Path(name).write_text(content)
    assert message in run("analyze", name, *more, code=2 if "pairs" in message else 1).err


def test_a_mistake_in_the_file_is_told_before_anything_is_imported_or_loaded() -> None:
    file = Path("log.jsonl").absolute()
    file.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    code = (
        "import sys\n"
        "from lookahead_hf.cli import main\n"
        f"assert main(['analyze', {str(file)!r}, '--model', 'nowhere', '--references']) == 1\n"
        "assert not {'torch', 'transformers', 'numba'} & {*sys.modules}\n"
    )
    root = Path(__file__).parents[2]
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
        Sample(UNGROUPED, (asked,), "b", is_conversation=True),
        Sample("5", (asked,), is_conversation=True),
    ]
    lines.write_text("a\n \nb\n")
    assert asked_in(lines, 9) == ["a", "b"]
    lines.write_text('a\n {"prompt": "b", "group": "c", "completion": "d"}\n["e"]\n')
    assert [(each.group, each.output) for each in read_samples(lines, 9)] == [
        (UNGROUPED, None),
        ("c", "d"),
        (UNGROUPED, None),
    ]
    written("log.jsonl", *[{"prompt": str(number), "group": number % 2} for number in range(20)])
    taken = asked_in(file, 3)
    assert taken == ["0", "1", "6", "7", "12", "13"]  # three of each group, over the whole file
    with pytest.raises(CommandError, match="UTF-8"):
        file.write_bytes(b"\xff\n")
        read_samples(file, 9)

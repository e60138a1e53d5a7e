"""`lookahead-hf trace` on a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from lookahead_hf.cli import main
from lookahead_hf.trace import Trace
from tests.helpers.tiny_chat import DRAFTING


def test_a_text_is_shown_and_written(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ["--config", json.dumps(DRAFTING)]
    words = ["trace", "--model", folder, *config, "--new-tokens", "60", "abc abc"]
    page, events = tmp_path / "trace.html", tmp_path / "trace.json"
    assert main([*words, "--html", str(page), "--perfetto", str(events)]) == 0
    shown = capsys.readouterr().out
    assert "the model itself: " in shown and "‹" in shown and "ngram" in shown
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(events.read_text())["traceEvents"]

    assert main([*words, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    found = Trace.from_dict(stats["trace"])
    assert len(found.tokens(0)) == stats["num_emitted"]
    assert stats["num_emitted"] - found.num_by_origin["model"] == stats["num_accepted"] > 0
    nodes = [node for step in found.steps for row in step.rows for node in row.nodes]
    drafted = Counter(source for node in nodes for source in node.sources)
    assert drafted == {name: source["drafted"] for name, source in stats["per_source"].items()}
    text = "".join(found.texts(0))
    assert "‹" not in text and text in shown.replace("‹", "").replace("›", "")


def test_a_file_that_cannot_be_written_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--html", str(tmp_path / "none" / "trace.html"), "abc"]) == 2
    assert "No such file" in capsys.readouterr().err

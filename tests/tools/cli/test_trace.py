"""`lookahead-hf trace` on a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from lookahead_hf.trace import Trace
from tests.helpers.commands import Run
from tests.helpers.tiny_chat import DRAFTING


def test_a_text_is_shown_and_written(folder: str, run: Run) -> None:
    config = ["--config", json.dumps(DRAFTING)]
    words = ["trace", "--model", folder, *config, "--new-tokens", "60", "abc abc"]
    shown = run(*words, "--html", "trace.html", "--perfetto", "trace.json").out
    assert "the model itself: " in shown and "‹" in shown and "ngram" in shown
    assert Path("trace.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(Path("trace.json").read_text())["traceEvents"]

    stats = run(*words, "--json").result["stats"]
    found = Trace.from_dict(stats["trace"])
    assert len(found.tokens(0)) == stats["num_emitted"]
    assert stats["num_emitted"] - found.num_by_origin["model"] == stats["num_accepted"] > 0
    nodes = [node for step in found.steps for row in step.rows for node in row.nodes]
    drafted = Counter(source for node in nodes for source in node.sources)
    assert drafted == {name: source["drafted"] for name, source in stats["per_source"].items()}
    text = "".join(found.texts(0))
    assert "‹" not in text and text in shown.replace("‹", "").replace("›", "")

"""The commands that write texts, on a tiny model, from the command line to what they show."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.cli.commands import texts
from lookahead_hf.tools.cli.measuring import Call
from tests.helpers.commands import Run
from tests.helpers.grammars import LEVEL, schema
from tests.helpers.tiny_chat import DRAFTING, byte_tokenizer, save_tiny_chat

COMMON = ["--new-tokens", "24", "--config", json.dumps(DRAFTING)]


def test_demo_compares_texts_and_speeds(folder: str, run: Run) -> None:
    words = ["demo", "--model", folder, "--dtype", "float32", "--prompt", "abc abc", *COMMON]
    shown = run(*words).out
    assert "float32: identical, 1 of 1" in shown
    found = run(*words, "--json").result
    plain, ours = found["lines"]
    assert (plain["ratio"], plain["tokens_per_step"]) == (1.0, 1.0)
    assert ours["tokens_per_step"] > 1.0 and ours["identical"] == 1.0
    assert found["texts"] == {"float32": "identical, 1 of 1"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_fails_where_texts_part_without_a_near_tie(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    write = texts.Stage.write

    def changed(stage: texts.Stage, inputs: Any, how: Any) -> Call:
        call = write(stage, inputs, how)
        ids = call.rows[0]
        changed = (*ids[:5], (ids[5] + 1) % 100, *ids[6:])
        return replace(call, rows=(changed,)) if how["speculative"] else call

    monkeypatch.setattr(texts.Stage, "write", changed)
    words = ["demo", "--model", folder, "--dtype", dtype, "--new-tokens", "8", "--prompt", "abc"]
    found = run(*words, code=1)
    assert "parts beyond near ties, 1 of 1" in found.out and "report this bug" in found.err


@pytest.mark.parametrize("size", [1, 2])
def test_generate_writes_plains_texts(folder: str, run: Run, size: int) -> None:
    words = ["generate", "--model", folder, *COMMON, "--batch-size", str(size), "abc abc", "abcd"]
    ours, plain = (
        [json.loads(line) for line in run(*words, "--json", *more).out.splitlines()]
        for more in ([], ["--plain"])
    )
    assert [each["prompt"] for each in ours] == ["abc abc", "abcd"]
    assert [each["text"] for each in ours] == [each["text"] for each in plain]
    assert ours[0]["stats"]["num_accepted"] > 0 and plain[0]["stats"] is None
    assert plain[0]["num_tokens"] == 24
    shown = run(*words, "--stats")
    assert shown.out == "".join(f"{each['text']}\n" for each in ours)
    assert "tokens/s" in shown.err and "draft tokens accepted" in shown.err


def test_settings_reach_the_call(
    folder: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(*given: Any, **named: Any) -> None:
        raise AssertionError("this would take longer than the text")

    monkeypatch.setattr(lookahead_hf, "warm_up", warm_up)
    assistant = save_tiny_chat(tmp_path / "assistant")
    pool = NgramPool(1_000, vocab_size=len(byte_tokenizer()))
    pool.add(byte_tokenizer()("abc abc abc")["input_ids"])
    pool.save("a.pool")
    Path("old.txt").write_text("abc abc")
    drafted = ["--pool", "a.pool", "--prediction", "old.txt", "--assistant", str(assistant)]
    sampled = ["--temperature", "0.7", "--top-p", "0.9", "--seed", "3"]
    words = ["generate", "--model", folder, *COMMON, *drafted, *sampled, "--json", "abc abc"]
    found = [run(*words).result, run(*words).result]
    assert found[0]["text"] == found[1]["text"]
    assert {"pool", "prediction", "assistant"} <= found[0]["stats"]["per_source"].keys()


def test_a_text_obeys_a_schema(folder: str, run: Run) -> None:
    pytest.importorskip("xgrammar")
    Path("schema.json").write_text(json.dumps(schema(level=LEVEL)))
    words = ["generate", "--model", folder, *COMMON, "--json-schema", "schema.json", "--json", "x"]
    found = run(*words, "--max-new-tokens", "60").result
    assert json.loads(found["text"])["level"] in LEVEL["enum"]
    assert found["stats"]["per_source"]["grammar"]["accepted"] > 0
    Path("schema.json").write_text("{")
    assert "the JSON schema cannot be compiled" in run(*words, code=1).err


def test_a_trace_is_shown_and_written(folder: str, run: Run) -> None:
    words = ["trace", "--model", folder, *COMMON, "abc abc"]
    shown = run(*words, "--html", "trace.html").out
    assert "the model itself: " in shown and "‹" in shown and "ngram" in shown
    assert Path("trace.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    stats = run(*words, "--json").result["stats"]
    rows = [row for step in stats["trace"]["steps"] for row in step["rows"]]
    assert sum(len(row["tokens"]) for row in rows) == stats["num_emitted"]
    assert sum(len(row["accepted"]) for row in rows) == stats["num_accepted"] > 0
    nodes = [node for row in rows for node in row["nodes"]]
    drafted = Counter(source for node in nodes for source in node["sources"])
    assert drafted == {name: source["drafted"] for name, source in stats["per_source"].items()}
    text = "".join(text for row in rows for text in row["texts"])
    assert text in shown.replace("‹", "").replace("›", "")

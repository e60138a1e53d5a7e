"""The generating commands on a tiny model, from the command line to the table."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lookahead_hf
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.cli.commands import demo
from lookahead_hf.tools.cli.comparison import run_speculative
from lookahead_hf.tools.cli.measuring import Call
from tests.helpers.commands import Run
from tests.helpers.grammars import LEVEL, schema
from tests.helpers.tiny_chat import DRAFTING, byte_tokenizer, save_tiny_chat


def test_demo_shows_identical_texts_and_what_was_drafted(folder: str, run: Run) -> None:
    words = ["demo", "--model", folder, "--dtypes", "float32", "--new-tokens", "80"]
    shown = run(*words, "--prompt", "abc abc abc").out
    assert "identical: all 80 tokens" in shown
    assert "float32: identical, 1 of 1" in shown
    steps = float(shown.splitlines()[-3].split()[-2])
    assert steps > 1.0


def test_demo_and_generate_as_json(folder: str, run: Run) -> None:
    common = ["--model", folder, "--new-tokens", "24", "--json", "--config", json.dumps(DRAFTING)]
    (outcome,) = run("demo", *common, "--dtypes", "float32", "--prompt", "abc abc").result
    assert outcome["dtype"] == "float32" and outcome["divergence"] is None
    speculative = run("generate", *common, "abc abc").result
    plain = run("generate", *common, "--plain", "abc abc").result
    assert speculative["text"] == plain["text"] and plain["num_tokens"] == 24
    assert speculative["stats"]["num_accepted"] > 0 and plain["stats"] is None


@pytest.mark.parametrize("command", ["generate", "trace"])
def test_a_command_that_writes_one_text_drafts_at_once(
    command: str, folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(*given: Any, **named: Any) -> None:
        raise AssertionError("this would take longer than the text")

    monkeypatch.setattr(lookahead_hf, "warm_up", warm_up)
    common = ["--model", folder, "--new-tokens", "24", "--config", json.dumps(DRAFTING)]
    found = run(command, *common, "--json", "abc abc").result
    assert found["stats"]["num_accepted"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_fails_where_texts_part_without_a_near_tie(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def changed(*arguments: Any) -> Call:
        call = run_speculative(*arguments)
        ids = call.rows[0]
        return replace(call, rows=((*ids[:5], (ids[5] + 1) % 100, *ids[6:]),))

    monkeypatch.setattr(demo, "run_speculative", changed)
    words = ["demo", "--model", folder, "--dtype", dtype, "--new-tokens", "8", "--prompt", "abc"]
    shown = run(*words, code=1)
    assert "The texts part after 5 identical tokens" in shown.out
    assert "BUG: parts beyond near ties, 1 of 1" in shown.out and "report this bug" in shown.err


@pytest.fixture
def generate(run: Run, folder: str) -> Run:
    """`lookahead-hf generate` with a few tokens."""
    return partial(run, "generate", "--model", folder, "--max-new-tokens", "24")


def test_a_pipe_gets_the_texts_alone(generate: Run) -> None:
    texts = [generate("--plain", prompt).out for prompt in ("abc abc", "abcd abcd ab")]
    for size in ("1", "2"):
        out, err = generate("abc abc", "abcd abcd ab", "--batch-size", size, "--stats")
        assert out == "".join(texts)
        assert "tokens/s" in err and "draft tokens accepted" in err


def test_sampling(generate: Run) -> None:
    greedy = generate("--temperature", "0", "abc abc").out
    settings = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "5", "abc abc"]
    plain = generate("--plain", *settings).out
    assert generate(*settings).out == plain != greedy


@pytest.mark.parametrize("source", ["prediction", "pool", "assistant", "prompt_lookup", "file"])
def test_each_way_to_draft(source: str, folder: str, generate: Run) -> None:
    text = generate("--plain", "abc abc").out
    Path("text.txt").write_text(text)
    Path("config.json").write_text('{"drafters": "ngram", "max_draft_nodes": 8}')
    pool = NgramPool(1_000)
    pool.add(byte_tokenizer()("abc abc<end>" + text)["input_ids"])
    pool.save("pool")
    words = {
        "prediction": ["--prediction", "text.txt"],
        "pool": ["--pool", "pool"],
        "assistant": ["--assistant", folder],
        "prompt_lookup": ["--config", "prompt_lookup"],
        "file": ["--config", "config.json"],
    }[source]
    if "--config" not in words:
        words += ["--config", json.dumps(DRAFTING)]
    shown = generate("--json", *words, "abc abc").result
    assert shown["text"] + "\n" == text
    stats, name = shown["stats"], "ngram" if words[0] == "--config" else source
    assert stats["fallback_reason"] is None and name in stats["per_source"]
    assert stats["per_source"][name]["drafted"] > 0


def test_the_command_obeys_a_schema(tmp_path: Path, run: Run) -> None:
    folder, file = save_tiny_chat(tmp_path / "model"), tmp_path / "schema.json"
    file.write_text(json.dumps(schema(level=LEVEL, is_open={"type": "boolean"})))
    common = ("--model", str(folder), "--json-schema", str(file), "--max-new-tokens", "60")
    record = json.loads(run("generate", *common, "abc").out)
    assert record["level"] in LEVEL["enum"]
    file.write_text('{"type": "x"}')
    said = run("generate", *common, "abc", code=1).err
    assert "the JSON schema cannot be compiled: Unsupported type" in said.splitlines()[-1]
    file.write_bytes(b'{"title": "gr\xf6\xdfe"}')
    said = run("generate", *common, "abc", code=1).err
    assert f"{file} is not text in UTF-8: " in said.splitlines()[-1]

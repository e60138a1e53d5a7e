"""The generating commands on a tiny model, from the command line to the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.cli import demo, main
from lookahead_hf.cli.comparison import run_speculative
from lookahead_hf.cli.measuring import Call
from lookahead_hf.ngram_pool import NgramPool
from tests.helpers.tiny_chat import DRAFTING, byte_tokenizer


def test_demo_shows_identical_texts_and_what_was_drafted(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--model", folder, "--dtypes", "float32", "--new-tokens", "80"]
    assert main([*words, "--prompt", "abc abc abc"]) == 0
    shown = capsys.readouterr().out
    assert "identical: all 80 tokens" in shown
    assert "float32: identical, 1 of 1" in shown
    steps = float(shown.splitlines()[-3].split()[-2])
    assert steps > 1.0


def test_demo_and_generate_as_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", folder, "--new-tokens", "24", "--json", "--config", json.dumps(DRAFTING)]
    assert main(["demo", *common, "--dtypes", "float32", "--prompt", "abc abc"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["dtype"] == "float32" and outcome["parting"] is None
    assert main(["generate", *common, "abc abc"]) == 0
    speculative = json.loads(capsys.readouterr().out)
    assert main(["generate", *common, "--plain", "abc abc"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert speculative["text"] == plain["text"] and plain["num_tokens"] == 24
    assert speculative["stats"]["num_accepted"] > 0 and plain["stats"] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_fails_where_texts_part_without_a_near_tie(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def changed(*arguments: Any) -> Call:
        call = run_speculative(*arguments)
        ids = call.rows[0]
        return replace(call, rows=((*ids[:5], (ids[5] + 1) % 100, *ids[6:]),))

    monkeypatch.setattr(demo, "run_speculative", changed)
    words = ["demo", "--model", folder, "--dtype", dtype, "--new-tokens", "8", "--prompt", "abc"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "The texts part after 5 identical tokens" in shown.out
    assert "BUG: parts beyond near ties, 1 of 1" in shown.out and "report this bug" in shown.err


def run(capsys: pytest.CaptureFixture[str], folder: str, *words: str) -> tuple[str, str]:
    """Stdout and stderr of `lookahead-hf generate` with a few tokens."""
    assert main(["generate", "--model", folder, "--max-new-tokens", "24", *words]) == 0
    return capsys.readouterr()


def test_a_pipe_gets_the_texts_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [run(capsys, folder, "--plain", prompt)[0] for prompt in ("abc abc", "abcd abcd ab")]
    for size in ("1", "2"):
        out, err = run(capsys, folder, "abc abc", "abcd abcd ab", "--batch-size", size, "--stats")
        assert out == "".join(texts)
        assert "tokens/s" in err and "draft tokens accepted" in err


def test_sampling(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = run(capsys, folder, "--temperature", "0", "abc abc").out
    settings = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "5", "abc abc"]
    plain = run(capsys, folder, "--plain", *settings).out
    assert run(capsys, folder, *settings).out == plain != greedy


@pytest.mark.parametrize("source", ["prediction", "pool", "assistant", "prompt_lookup", "file"])
def test_each_way_to_draft(
    source: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, folder, "--plain", "abc abc")[0]
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "config.json").write_text('{"method": "ngram", "num_speculative_tokens": 8}')
    pool = NgramPool(1_000)
    pool.add(byte_tokenizer()("abc abc<end>" + text)["input_ids"])
    pool.save(tmp_path / "pool")
    words = {
        "prediction": ["--prediction", str(tmp_path / "text.txt")],
        "pool": ["--pool", str(tmp_path / "pool")],
        "assistant": ["--assistant", folder],
        "prompt_lookup": ["--config", "prompt_lookup"],
        "file": ["--config", str(tmp_path / "config.json")],
    }[source]
    if "--config" not in words:
        words += ["--config", json.dumps(DRAFTING)]
    shown = json.loads(run(capsys, folder, "--json", *words, "abc abc").out)
    assert shown["text"] + "\n" == text
    stats, name = shown["stats"], "ngram" if words[0] == "--config" else source
    assert stats["fallback_reason"] is None and name in stats["per_source"]
    assert stats["per_source"][name]["drafted"] > 0

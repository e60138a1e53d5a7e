"""`lookahead-hf pool`: from texts to a file, and what is said of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_hf.cli import main
from lookahead_hf.drafting.sources.pool import fingerprint
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.matches import NUM_BUCKETS
from tests.helpers.tiny_chat import byte_tokenizer

EVEN = np.full(NUM_BUCKETS, 0.5)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a command with --json and return what it says."""
    assert main(["pool", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def continuation(file: str, text: str) -> str:
    pool = NgramPool.load(file)
    ids = byte_tokenizer()(text)["input_ids"]
    tree = pool.grow(ids, EVEN, 4, min_ngram=4)
    return byte_tokenizer().decode(tree.token_ids)


def test_a_pool_is_built_from_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("the quick brown fox\njumps\n")
    Path("b.txt").write_text("")
    said = run(capsys, "build", "--tokenizer", folder, "a.txt", "b.txt")
    assert said["file"] == "pool.safetensors"
    assert (said["num_tokens"], said["num_texts"]) == (26, 1)
    assert said["vocab_size"] == len(byte_tokenizer())
    assert said["tokenizer_fingerprint"] == fingerprint(byte_tokenizer())
    assert continuation("pool.safetensors", "a quick") == " bro"


def test_a_long_text_is_cut_at_line_ends(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("long.txt").write_text("word ü and more of it\n" * 5_000)
    said = run(capsys, "build", "--tokenizer", folder, "long.txt")
    assert said["num_tokens"] == 23 * 5_000
    assert said["num_texts"] == 2


def test_a_field_of_each_record_is_taken(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"turn": {"answer": f"number {i} is even"}, "text": "no"} for i in range(600)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    words = ["build", "--tokenizer", folder, "--output", "out", "--field", "turn.answer"]
    said = run(capsys, *words, "a.jsonl")
    assert said["num_texts"] == 600
    assert continuation("out", "number 7 is") == " eve"


def save(file: str, *texts: list[int], **options: Any) -> NgramPool:
    pool = NgramPool(**{"max_tokens": 1_000, **options})
    for text in texts:
        pool.add(text)
    pool.save(file)
    return pool


def test_info_says_what_a_pool_holds(capsys: pytest.CaptureFixture[str]) -> None:
    save("a", [1, 2, 3], vocab_size=49_152)
    assert main(["pool", "info", "a"]) == 0
    shown = capsys.readouterr().out
    assert "tokens: 3 of 1,000 at most" in shown
    assert "vocabulary: 49,152 tokens" in shown
    assert "tokenizer: unknown" in shown
    assert run(capsys, "info", "a")["vocab_size"] == 49_152


def test_pools_are_merged_in_order_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    save("a", list(range(900)))
    save("b", list(range(900, 1_800)), max_tokens=901)
    said = run(capsys, "merge", "c", "a", "b")
    assert (said["num_tokens"], said["max_tokens"]) == (1_800, 1_802)
    assert NgramPool.load("c").grow([899], EVEN, 1).token_ids.tolist() == []
    assert NgramPool.load("c").grow([898], EVEN, 1).token_ids.tolist() == [899]
    said = run(capsys, "merge", "c", "a", "b", "--max-tokens", "1000")
    assert said["num_tokens"] == 998
    # Into one of them.
    assert run(capsys, "merge", "a", "a", "b")["num_tokens"] == 1_800


def test_check_finds_a_changed_bit(capsys: pytest.CaptureFixture[str]) -> None:
    save("a", list(range(900)))
    assert run(capsys, "check", "a") == {"file": "a", "intact": True}
    assert main(["pool", "check", "a"]) == 0
    assert capsys.readouterr().out == "a is intact\n"
    content = bytearray(Path("a").read_bytes())
    content[-1] ^= 4
    Path("a").write_bytes(content)
    assert main(["pool", "check", "a"]) == 1
    assert "checksum" in capsys.readouterr().err


def test_what_cannot_be_done_is_one_message(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("hello")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    Path("other.jsonl").write_text('{"content": "a"}\n')
    Path("number.jsonl").write_text('{"text": 5}\n')
    save("a", [1], vocab_size=10)
    save("b", [1], vocab_size=20)
    save("x", [1], tokenizer_fingerprint="X")
    save("y", [1], tokenizer_fingerprint="Y")
    save("none", [15])
    save("damaged", list(range(900)))
    content = bytearray(Path("damaged").read_bytes())
    content[-1] ^= 4
    Path("damaged").write_bytes(content)
    build = ["build", "--tokenizer", folder]
    failing = {
        "nothing.txt: No such file": [*build, "nothing.txt"],
        "could not be loaded": ["build", "--tokenizer", ".", "text.txt"],
        "no folder nowhere": [*build, "nothing.txt", "--output", "nowhere/c"],
        "no folder beyond": ["merge", "beyond/c", "a", "nothing"],
        "bytes.txt is not a text in UTF-8": [*build, "bytes.txt"],
        "broken.jsonl, line 2: this is not JSON": [*build, "broken.jsonl"],
        "no field 'text', only content": [*build, "other.jsonl"],
        "the field 'text' is not a text": [*build, "number.jsonl"],
        "max_tokens is 0": [*build, "text.txt", "--max-tokens", "0"],
        "is not a pool": ["info", "text.txt"],
        "have vocab_size 10 and 20": ["merge", "c", "a", "b"],
        "tokenizer_fingerprint 'X' and 'Y'": ["merge", "c", "none", "x", "y"],
        "token ids up to 15, but their vocabulary has 10": ["merge", "c", "none", "a"],
        "its checksum does not match": ["merge", "c", "none", "damaged"],
    }
    for message, words in failing.items():
        assert main(["pool", *words]) == 1, words
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said
    assert not Path("pool.safetensors").exists() and not Path("c").exists()

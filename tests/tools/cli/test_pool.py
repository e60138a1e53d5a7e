"""`lookahead-hf pool`: from texts to a file, and what is said of files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.sources.pool import PoolDrafter, fingerprint
from tests.helpers.commands import Run
from tests.helpers.ngrams import grown
from tests.helpers.tiny_chat import byte_tokenizer

Pool = Callable[..., Any]


@pytest.fixture
def pool(run: Run) -> Pool:
    """Runs a command on pools and returns what it says to programs."""
    return lambda *words: run("pool", *words, "--json").result


def continuation(file: str, text: str) -> str:
    ids = byte_tokenizer()(text)["input_ids"]
    tree = grown(NgramPool.load(file), ids, 4, PoolDrafter.traits.prior)
    return byte_tokenizer().decode(tree.token_ids)


def test_a_pool_is_built_from_text(folder: str, pool: Pool) -> None:
    Path("a.txt").write_text("the quick brown fox\njumps\n")
    Path("b.txt").write_text("")
    said = pool("build", "--tokenizer", folder, "a.txt", "b.txt")
    assert said["file"] == "pool.safetensors"
    assert (said["num_tokens"], said["num_texts"]) == (26, 1)
    assert said["vocab_size"] == len(byte_tokenizer())
    assert said["tokenizer_fingerprint"] == fingerprint(byte_tokenizer())
    assert continuation("pool.safetensors", "a quick") == " bro"


def test_a_long_text_is_cut_at_line_ends(folder: str, pool: Pool) -> None:
    Path("long.txt").write_text("word ü and more of it\n" * 5_000)
    said = pool("build", "--tokenizer", folder, "long.txt")
    assert said["num_tokens"] == 23 * 5_000
    assert said["num_texts"] == 2


def test_a_field_of_each_record_is_taken(folder: str, pool: Pool) -> None:
    records = [{"answer": f"number {i} is even", "text": "no"} for i in range(60)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    words = ["build", "--tokenizer", folder, "--output", "out", "--field", "answer"]
    said = pool(*words, "a.jsonl")
    assert said["num_texts"] == 60
    assert continuation("out", "number 7 is") == " eve"


def save(file: str, text: Sequence[int], **options: Any) -> None:
    pool = NgramPool(**{"max_tokens": 1_000, **options})
    pool.add(text)
    pool.save(file)


def test_info_says_what_a_pool_holds_and_finds_a_changed_bit(run: Run, pool: Pool) -> None:
    save("a", [1, 2, 3], vocab_size=49_152)
    shown = run("pool", "info", "a").out
    assert "tokens: 3 of 1,000 at most" in shown
    assert "vocabulary: 49,152 tokens" in shown
    assert "tokenizer: unknown" in shown
    assert pool("info", "a")["vocab_size"] == 49_152
    content = bytearray(Path("a").read_bytes())
    content[-8] ^= 4  # of the last token, before the end of its text
    Path("a").write_bytes(content)
    assert "checksum" in run("pool", "info", "a", code=1).err


def test_pools_are_merged_in_order_and_whole(pool: Pool) -> None:
    save("a", range(900))
    save("b", range(900, 1_800), max_tokens=901)
    said = pool("merge", "c", "a", "b")
    assert (said["num_tokens"], said["max_tokens"]) == (1_800, 1_802)
    assert grown(NgramPool.load("c"), [899]).token_ids.tolist() == []
    assert grown(NgramPool.load("c"), [898]).token_ids.tolist() == [899]
    said = pool("merge", "c", "a", "b", "--max-tokens", "1000")
    assert said["num_tokens"] == 801  # older ones have left
    # Into one of them.
    assert pool("merge", "a", "a", "b")["num_tokens"] == 1_800


WORKER = """
import os, signal, sys
from lookahead_hf.ngram_pool import NgramPool

name, first, dies_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
shared, learned = NgramPool.load("shared.safetensors"), NgramPool(1_000)
for number in range(5):
    assert len(shared) == 900
    learned.add(range(first + 100 * number, first + 100 * number + 50))
    if number == dies_at:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # its part is written, not whole
    learned.save(f"learned/{name}.safetensors")
"""


def test_pools_of_two_workers_are_merged_though_one_was_killed(pool: Pool) -> None:
    save("shared.safetensors", range(900))
    Path("learned").mkdir()
    found = {"PYTHONPATH": str(Path(__file__).parents[3])}
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, *words], env=os.environ | found)
        for words in (("a", "10000", "-1"), ("b", "20000", "3"))
    ]
    assert [worker.wait(300) for worker in workers] == [0, -signal.SIGKILL]
    left = sorted(each.suffix for each in Path("learned").iterdir())
    assert left == [".part", ".safetensors", ".safetensors"]
    files = sorted(map(str, Path("learned").glob("*.safetensors")))
    said = pool("merge", "all.safetensors", "shared.safetensors", *files)
    assert said["num_texts"] == 1 + 5 + 3
    assert said["num_tokens"] == 900 + 8 * 50
    merged = NgramPool.load("all.safetensors")
    following = {n: grown(merged, [n]).token_ids.tolist() for n in (10_440, 20_240, 20_340)}
    assert following == {10_440: [10_441], 20_240: [20_241], 20_340: []}

"""What the commands say of words and files that they cannot use: one message and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import lookahead_hf
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.cli import main
from tests.helpers.tiny_chat import save_tiny_chat

COMMANDS = ("demo", "generate", "trace", "bench", "pool", "env")
ACTIONS = ("pool build", "pool info", "pool merge", "pool check")

FILES = {
    "text.txt": "hello",
    "empty.jsonl": "\n\n",
    "cut.jsonl": '{"prompt": "a", "text": "a"}\n\n{"prompt"',
    "cut.txt": 'a prompt\n{"prompt": "b"',
    "list.jsonl": "[1]",
    "content.jsonl": '{"content": "a"}\n',
    "number.jsonl": "5",
    "five.jsonl": '{"text": 5}\n',
    "role.jsonl": '{"messages": [{"role": "user"}]}',
    "answer.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}',
    "third.txt": '{"prompt": "b"}\na\n{"promt": "b"}',
    "plain.jsonl": "a prompt",
}
POOLS: dict[str, tuple[Sequence[int], dict[str, object]]] = {
    "a": ([1], {"vocab_size": 10}),
    "b": ([1], {"vocab_size": 20}),
    "x": ([1], {"tokenizer_fingerprint": "X"}),
    "y": ([1], {"tokenizer_fingerprint": "Y"}),
    "none": ([15], {}),
    "damaged": (range(900), {}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, files of prompts and pools."""
    folder = tmp_path_factory.mktemp("files")
    save_tiny_chat(folder / "model")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, (tokens, own) in POOLS.items():
        pool = NgramPool(1_000, **own)  # type: ignore[arg-type]
        pool.add(tokens)
        pool.save(folder / name)
    content = bytearray((folder / "damaged").read_bytes())
    content[-1] ^= 4
    (folder / "damaged").write_bytes(content)
    return folder


BUILD = "pool build --tokenizer ./model "
TABLE = [
    ("sing", 2, "demo|generate|trace|serve|analyze|bench|pool|compile|env"),
    ("pool", 2, "build|info|merge|check"),
    ("bench --rounds 0", 2, "x>=1"),
    ("generate --threads 100000 Hello", 2, "1<=x<=1024"),
    (f"bench --seed {2**63}", 2, "is not in the range -9223372036854775808<=x<="),
    ("generate --top-p 2 Hello", 2, "0<x<=1"),
    ("generate --config fast Hello", 2, "and no preset; known: default, prompt_lookup"),
    ("generate --config {'budget':3} Hello", 2, "Expecting property name"),
    ('generate --config {"drafters":["x"]} Hello', 2, "there is no drafter 'x'"),
    ("generate --pool nothing", 2, "'nothing' does not exist"),
    ("demo --prediction nothing", 2, "'nothing' does not exist"),
    ("trace --html nowhere/trace.html abc", 2, "No such file"),
    ("analyze text.txt --model ./nothing --html nowhere/report.html", 2, "No such file"),
    ("generate Hello --model ./nothing", 1, "(there is no such folder): --model"),
    ("generate Hello --model .", 1, "the tokenizer of . could not be loaded (ValueError"),
    ("generate Hello --device cuda:77", 1, "--device cuda:77 cannot be used here, take cpu"),
    ("generate Hello --device meta", 1, "--device meta cannot be used here, take cpu"),
    ("generate Hello --model ./model --assistant ./nothing", 1, "folder): --assistant takes"),
    ("generate Hello --model ./model --prediction bytes", 1, "utf-8"),
    ("generate Hello --model ./nothing --pool bytes", 1, "bytes is not a pool"),
    ("bench --prompts nothing.txt", 1, "cannot be read (No such file"),
    ("bench --prompts empty.jsonl", 1, "no prompt"),
    ("bench --prompts cut.jsonl", 1, "line 3: this is not JSON"),
    ("bench --prompts cut.txt", 1, "line 2: this is not JSON"),
    ("bench --prompts content.jsonl", 1, "line 1: no field 'prompt', only content"),
    ("bench --prompts number.jsonl", 1, "line 1: no field 'prompt', only a int"),
    ("analyze nothing.txt", 1, "cannot be read"),
    ("analyze empty.jsonl", 1, "has no prompt"),
    ("analyze cut.jsonl", 1, "line 3 is not JSON"),
    ("analyze list.jsonl", 1, "line 1 is not a JSON object"),
    ("analyze content.jsonl", 1, "neither a text `prompt` nor a list `messages`"),
    ("analyze role.jsonl", 1, "neither a text `prompt`"),
    ("analyze answer.jsonl", 1, "no question"),
    ("analyze cut.txt", 1, "line 2 is not JSON"),
    ("analyze third.txt", 1, "line 3 has neither a text `prompt`"),
    ("analyze plain.jsonl", 1, "line 1 is not JSON"),
    (f"{BUILD} nothing.txt", 1, "nothing.txt: No such file"),
    ("pool build --tokenizer . text.txt", 1, "could not be loaded"),
    (f"{BUILD} nothing.txt --output nowhere/c", 1, "no folder nowhere"),
    ("pool merge beyond/c a nothing", 1, "no folder beyond"),
    (f"{BUILD} bytes", 1, "bytes is not a text in UTF-8"),
    (f"{BUILD} cut.jsonl", 1, "cut.jsonl, line 3: this is not JSON"),
    (f"{BUILD} content.jsonl", 1, "no field 'text', only content"),
    (f"{BUILD} five.jsonl", 1, "the field 'text' is not a text"),
    (f"{BUILD} text.txt --max-tokens 0", 1, "max_tokens is 0"),
    ("pool info text.txt", 1, "is not a pool"),
    ("pool merge c a b", 1, "have vocab_size 10 and 20"),
    ("pool merge c none x y", 1, "tokenizer_fingerprint 'X' and 'Y'"),
    ("pool merge c none a", 1, "token ids up to 15, but their vocabulary has 10"),
    ("pool merge c none damaged", 1, "the pool is damaged"),
    *((f"{each} --help", 0, f"  lookahead-hf {each}") for each in (*COMMANDS, *ACTIONS)),
    *((f"{each} --version", 0, lookahead_hf.__version__) for each in ("", *COMMANDS[:-2])),
]
"""Words, the exit code, and a part of what is shown last."""


@pytest.mark.parametrize(("words", "code", "shown"), TABLE, ids=[row[0][:60] for row in TABLE])
def test_words(
    words: str,
    code: int,
    shown: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    before = {*files.iterdir()}
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert shown in (err if code else out) and "Traceback" not in err
    assert code == 0 or out == ""
    assert {*files.iterdir()} == before  # nothing is written where something is wrong

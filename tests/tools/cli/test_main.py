"""What the commands say of words, files and machines: one message, and an exit code."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers

import lookahead_hf
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.cli import main, models
from tests.helpers.commands import Run
from tests.helpers.tiny_chat import save_tiny_chat

ROOT = Path(__file__).parents[3]
COMMANDS = ("demo", "generate", "trace", "bench", "pool", "env")
ACTIONS = ("pool build", "pool info", "pool merge")

FILES = {
    "text.txt": "hello",
    "empty.jsonl": "\n\n",
    "cut.jsonl": '{"prompt": "a", "text": "a"}\n\n{"prompt"',
    "cut.txt": 'a prompt\n{"prompt": "b"',
    "list.jsonl": "[1]",
    "content.jsonl": '{"content": "a"}\n',
    "five.jsonl": '{"text": 5}\n',
    "role.jsonl": '{"messages": [{"role": "user"}]}',
}
POOLS: dict[str, tuple[Sequence[int], dict[str, object]]] = {
    "a": ([1], {"vocab_size": 10}),
    "b": ([1], {"vocab_size": 20}),
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
    ("pool", 2, "build|info|merge"),
    ("bench --rounds 0", 2, "x>=1"),
    ("generate --top-p 2 Hello", 2, "0<x<=1"),
    ("generate --config fast Hello", 2, "or one of default, prompt_lookup"),
    ("generate --config {'budget':3} Hello", 2, "Expecting property name"),
    ('generate --config {"drafters":["x"]} Hello', 2, "there is no drafter 'x'"),
    ("generate --pool nothing", 2, "'nothing' does not exist"),
    ("trace --html nowhere/trace.html abc", 2, "No such file"),
    ("generate Hello --model ./nothing", 1, "--model ./nothing could not be loaded ("),
    ("generate Hello --model ./model --device cuda:77", 1, "--model ./model could not be loaded ("),
    ("generate Hello --model ./model --assistant ./nothing", 1, "--assistant ./nothing could not"),
    ("generate Hello --model ./model --prediction bytes", 1, "utf-8"),
    ("generate Hello --model ./nothing --pool bytes", 1, "bytes is not a pool"),
    ("bench --prompts nothing.txt", 1, "No such file or directory: 'nothing.txt'"),
    ("bench --prompts empty.jsonl", 1, "empty.jsonl has no prompt"),
    ("bench --prompts cut.jsonl", 1, "line 3: this is not JSON"),
    ("analyze cut.txt", 1, "line 2: this is not JSON"),
    ("analyze list.jsonl", 1, "line 1: this is not a JSON object"),
    ("analyze content.jsonl", 1, "neither a text `prompt` nor a list `messages`"),
    ("analyze role.jsonl", 1, "neither a text `prompt`"),
    (f"{BUILD} nothing.txt", 1, "No such file or directory: 'nothing.txt'"),
    ("pool build --tokenizer . text.txt", 1, "--tokenizer . could not be loaded"),
    (f"{BUILD} text.txt --output nowhere/c", 2, "there is no folder nowhere"),
    (f"{BUILD} bytes", 1, "bytes is not a text in UTF-8"),
    (f"{BUILD} content.jsonl", 1, "line 1: no text 'text'"),
    (f"{BUILD} five.jsonl", 1, "line 1: no text 'text'"),
    (f"{BUILD} text.txt --max-tokens 0", 1, "max_tokens is 0"),
    ("pool info text.txt", 1, "is not a pool"),
    ("pool merge c a b", 1, "have vocab_size 10 and 20"),
    ("pool merge c none a", 1, "token ids up to 15, but their vocabulary has 10"),
    ("pool merge c none damaged", 1, "the pool is damaged"),
    ("--version", 0, lookahead_hf.__version__),
    *((f"{each} --help", 0, f"  lookahead-hf {each}") for each in (*COMMANDS, *ACTIONS)),
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


@pytest.mark.parametrize(
    "error", [ImportError("sentencepiece is needed"), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_an_error_while_loading_is_one_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", Mock(side_effect=error))
    # As of a variable of the shell that was never set: this is not the demo's model.
    message = run("generate", "Hello", "--model", "", code=1).err
    assert f"could not be loaded ({type(error).__name__}: {error})" in message


def test_an_empty_prompt_is_one_message(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert "prompt is empty" in run("generate", code=1).err


def test_a_prompt_that_is_not_utf_8(folder: str, run: Run) -> None:
    words = ["generate", "--model", folder, "--new-tokens", "4", "AB\udce9CAB"]
    assert "Error" not in run(*words).err


def test_an_interrupt_is_one_message(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(models, "ensure_demo_model", Mock(side_effect=KeyboardInterrupt))
    assert run("generate", "Hello", code=130) == ("", "\nlookahead-hf: interrupted\n")


def test_env_names_versions(run: Run) -> None:
    assert run("env", "--json").result["transformers"].startswith("5.")
    assert f"torch: {torch.__version__}" in run("env").out.splitlines()


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "lookahead_hf", "env"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().decode() == ""
    assert process.returncode == 0


def test_without_its_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    whole = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "click" else whole(name)
    )
    shown = run("env", code=1)
    assert shown.out == "" and "click" in shown.err and "pip install '.[cli]'" in shown.err


def test_the_package_works_without_the_commands_extra() -> None:
    script = (
        "import sys; sys.modules['click'] = None; "
        "import lookahead_hf.tools.cli.models, lookahead_hf.tools.cli.measuring"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)

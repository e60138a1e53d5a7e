"""The command line: help, exit codes, and the report of `env`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from lookahead_hf.cli import loading, main
from lookahead_hf.fallback import FallbackReason
from tests.helpers.tiny_chat import save_tiny_chat

COMMANDS = ("demo", "generate", "chat", "bench", "pool", "env")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"  lookahead-hf {command}" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sing"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert all(command in shown for command in COMMANDS)


def test_a_model_that_is_not_there_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(tmp_path / "nothing"), "Hello"]) == 1
    message = capsys.readouterr().err
    assert "could not be loaded" in message and "Traceback" not in message


def test_a_damaged_model_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save_tiny_chat(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["generate", "--model", str(tmp_path), "Hello"]) == 1
    message = capsys.readouterr().err
    assert "could not be loaded" in message and "Traceback" not in message


@pytest.mark.parametrize("missing", ["a package", "memory", "memory of the host", "a bug"])
def test_what_a_command_meets(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {
        "a package": ImportError("sentencepiece is needed"),
        "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."),
        "memory of the host": RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        "a bug": RuntimeError("shapes do not match"),
    }

    def fails(*_: object, **__: object) -> None:
        raise errors[missing]

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    monkeypatch.setattr(loading, "ensure_demo_model", lambda screen: "demo")
    assert main(["generate", "Hello"]) == 1
    message = capsys.readouterr().err
    found = {"a package": "sentencepiece is needed", "a bug": "shapes do not match"}
    assert found.get(missing, "lookahead-hf: out of memory (") in message
    assert "More." not in message


def test_a_text_longer_than_the_table_of_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_chat(tmp_path)
    config = GPT2Config(vocab_size=300, n_embd=48, n_layer=2, n_head=4, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(folder)
    words = ["generate", "--model", str(folder), "--new-tokens", "30", "Hello"]
    assert main(words) == 1
    assert "knows 16 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [("0,0.9", "temperature is 0"), ("0.7,2", "top-p is 2"), ("1", "two numbers"),
     ("a,b", "two numbers"), ("nan,0.5", "temperature is nan")],
)  # fmt: skip
def test_sampling_that_cannot_be(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--sample", given, "Hello"])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_terminal_is_told_that_a_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate"]) == 1
    assert "Type the prompt" in capsys.readouterr().err


def test_an_empty_prompt_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert main(["generate"]) == 1
    assert "prompt is empty" in capsys.readouterr().err


def test_env_names_versions_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["transformers"].startswith("5.")
    assert set(found["reasons for plain generation"]) == {reason.value for reason in FallbackReason}


def test_a_reader_that_stops_early_is_no_error() -> None:
    script = "import sys; from lookahead_hf.cli import main; sys.exit(main(['env']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert command.stderr.read().decode() == ""
    assert command.returncode == 0


def test_env_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "versions" in lines
    assert any(line.startswith("  torch: ") for line in lines)

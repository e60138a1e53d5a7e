"""The command line: help, exit codes, messages, encodings, and the report of `env`."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers

from lookahead_hf.fallback import FallbackReason
from lookahead_hf.tools.cli import loading
from tests.helpers.commands import Run

COMMANDS = ("demo", "generate", "trace", "bench", "pool", "env")
ROOT = Path(__file__).parents[3]
ACTIONS = ("pool build", "pool info", "pool merge", "pool check")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ImportError("sentencepiece is needed"), "sentencepiece is needed"),
        (torch.OutOfMemoryError("CUDA out of memory.\nMore."), "lookahead-hf: out of memory, take"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "lookahead-hf: out of memory, take",
        ),
        (RuntimeError("shapes do not match"), "shapes do not match"),
    ],
)
def test_an_error_while_loading_is_one_message(
    error: Exception, shown: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    fails = Mock(side_effect=error)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fails)  # no network in tests
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    monkeypatch.setattr(loading, "ensure_demo_model", lambda screen: "OWNER/demo")
    message = run("generate", "Hello", code=1).err
    assert shown in message and "More." not in message


def test_the_hub_is_asked_once_where_it_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    fails = Mock(side_effect=ConnectionError)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fails)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("something tries again"))
    message = run("generate", "Hello", "--model", "OWNER/none", code=1).err
    assert "hub cannot be reached, and the model is not in its cache" in message
    assert fails.call_count == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_empty_prompt_is_one_message(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    message = run("generate", code=1).err
    assert "prompt is empty" in message and ("Type the prompt" in message) is is_terminal


def test_an_interrupt_is_one_message(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(loading, "ensure_demo_model", Mock(side_effect=KeyboardInterrupt))
    assert run("generate", "Hello", code=130) == ("", "\nlookahead-hf: interrupted\n")


def test_env_names_versions_and_every_reason(run: Run) -> None:
    found = run("env", "--json").result
    assert found["versions"]["transformers"].startswith("5.")
    assert set(found["reasons for plain generation"]) == {reason.value for reason in FallbackReason}
    lines = run("env").out.splitlines()
    assert "versions" in lines
    assert any(line.startswith("  torch: ") for line in lines)


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "lookahead_hf", "env"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().decode() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_extra_the_command_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    whole = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else whole(name)
    )
    shown = run("env", code=1)
    assert shown.out == ""
    assert missing in shown.err and "pip install '.[cli]'" in shown.err


def test_the_package_works_without_the_commands_extra() -> None:
    script = (
        "import sys; sys.modules['click'] = sys.modules['rich'] = None; "
        "import lookahead_hf.tools.cli, lookahead_hf.tools.cli.real_model, "
        "lookahead_hf.tools.cli.measuring, lookahead_hf.tools.cli.measuring"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_a_prompt_that_is_not_utf_8(folder: str, run: Run) -> None:
    words = ["generate", "--model", folder, "--new-tokens", "4", "AB\udce9CAB"]
    assert "Error" not in run(*words).err


def test_an_empty_name_is_not_the_demos_model(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """As of a variable of the shell that was never set."""
    monkeypatch.setattr(loading, "ensure_demo_model", Mock(side_effect=AssertionError))
    said = run("generate", "Hello", "--model", "", code=1).err
    assert "could not be loaded" in said and "--model takes a folder" in said

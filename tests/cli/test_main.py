"""The command line: help, exit codes, and the report of `env`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_hf.cli import main
from lookahead_hf.fallback import FallbackReason

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

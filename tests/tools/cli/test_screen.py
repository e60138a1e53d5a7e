"""What commands show on a terminal and in a pipe."""

from __future__ import annotations

import io
import math
import sys

import pytest

from lookahead_hf.tools.cli.screen import JsonScreen, Screen, write_any_character

SOURCE = "\torders[month] [red]x[/red] :smile:"


def show(screen: Screen) -> None:
    screen.line(SOURCE, "bold")
    screen.note("a note")
    screen.table(["name", "tokens/s"], [["plain", "8.5"], ["[speculative]", "21.0"]])
    with screen.task("measuring", 10) as report:
        report(5)


def test_a_pipe_gets_the_result_alone_and_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    show(Screen())
    shown = capsys.readouterr()
    assert [line.rstrip() for line in shown.out.splitlines()] == [
        SOURCE,
        "name           tokens/s",
        "plain               8.5",
        "[speculative]      21.0",
    ]
    assert shown.err == "a note\nmeasuring ...\n"


def test_a_terminal_gets_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert Screen().has_colour and not Screen(is_plain=True).has_colour
    show(Screen())
    shown = capsys.readouterr().out
    assert SOURCE.strip() in shown and "\x1b[1m" in shown
    assert "a note" in shown and "[speculative]" in shown


def test_programs_get_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen = JsonScreen(indent=None)
    show(screen)
    screen.result({"a": [1, math.nan]})
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ('{"a": [1, null]}\n', "measuring ...\n")


def test_a_pipe_without_a_reader_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str) -> None:
        if text:
            raise BrokenPipeError

    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "write", write)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(BrokenPipeError):
        Screen().table(["name"], [["plain"]])


def test_characters_that_stdout_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_any_character()
    Screen().line("é")
    assert written.getvalue() == b"?\n"

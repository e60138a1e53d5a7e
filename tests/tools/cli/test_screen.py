"""What commands show on a terminal, in a pipe, and to programs."""

from __future__ import annotations

import io
import math
import sys

import pytest

from lookahead_hf.tools.cli.screen import Screen

SOURCE = "\torders[month] [red]x[/red] :smile:"


def show(screen: Screen) -> None:
    screen.line(SOURCE, bold=True)
    screen.note("a note")
    screen.table([["name", "tokens/s"], ["plain", "8.5"], ["[speculative]", "21.0"]])
    with screen.task("measuring", 10) as advance:
        advance()
    screen.result({"a": [1, math.nan]})


@pytest.mark.parametrize("is_terminal", [False, True])
def test_people_get_the_result_apart_from_notes(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    show(Screen())
    shown = capsys.readouterr()
    bold, end = ("\x1b[1m", "\x1b[0m") if is_terminal else ("", "")
    assert shown.out.replace(f"\n{end}", f"{end}\n").splitlines() == [
        f"{bold}{SOURCE}{end}",
        "name           tokens/s",
        "plain               8.5",
        "[speculative]      21.0",
    ]
    assert shown.err == "a note\nmeasuring ...\n"


def test_programs_get_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(Screen(as_json=True))
    assert capsys.readouterr().out == '{"a": [1, null]}\n'


def test_characters_that_stdout_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Screen().line("é")
    assert written.getvalue() == b"?\n"

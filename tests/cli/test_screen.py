"""What commands show with and without rich."""

from __future__ import annotations

import io
import sys

import pytest

from lookahead_hf.cli.screen import RichScreen, Screen, open_screen, write_any_character


def test_colours_are_for_terminals_unless_plain_text_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(open_screen()) is Screen
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert type(open_screen()) is RichScreen
    assert type(open_screen(is_plain=True)) is Screen


def test_plain_tables_align_the_first_column_left(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table(["name", "tokens/s"], [["plain", "8.5"], ["speculative", "21.0"]])
    assert capsys.readouterr().out.splitlines() == [
        "name         tokens/s",
        "plain             8.5",
        "speculative      21.0",
    ]


def test_progress_does_not_mix_with_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().task("downloading", 10) as report:
        report(5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading" in captured.err


def test_rich_screen_takes_text_literally(capsys: pytest.CaptureFixture[str]) -> None:
    screen = RichScreen()
    screen.write("orders[month]", "bold")
    screen.line(" [red]x[/red] :smile:")
    screen.table(["a", "b"], [["[x]", "1"]])
    with screen.task("measuring", 10) as report:
        report(10)
    shown = capsys.readouterr().out
    assert "orders[month]" in shown and "[red]x[/red] :smile:" in shown and "[x]" in shown


def test_characters_that_stdout_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_any_character()
    Screen().line("é")
    assert written.getvalue() == b"?\n"

"""What commands show with and without rich."""

from __future__ import annotations

import io
import sys

import pytest

from lookahead_hf.cli.screen import PlainScreen, RichScreen, open_screen


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_text() -> None:
    assert isinstance(open_screen(), PlainScreen)


def test_a_terminal_gets_colours_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(open_screen(), RichScreen)
    assert isinstance(open_screen(colour=False), PlainScreen)


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(open_screen(), PlainScreen)


def test_plain_tables_align_the_first_column_left(capsys: pytest.CaptureFixture[str]) -> None:
    PlainScreen().table(["name", "tokens/s"], [["plain", "8.5"], ["speculative", "21.0"]])
    assert capsys.readouterr().out.splitlines() == [
        "name         tokens/s",
        "plain             8.5",
        "speculative      21.0",
    ]


def test_progress_does_not_mix_with_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainScreen().task("downloading", 10) as report:
        report(5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading" in captured.err


def test_rich_screen_takes_text_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    screen = RichScreen()
    screen.write("orders[month]", "bold")
    screen.line(" [red]x[/red] :smile:")
    screen.table(["a", "b"], [["[x]", "1"]])
    with screen.task("measuring", 10) as report:
        report(10)
    shown = terminal.getvalue()
    assert "orders[month]" in shown and "[red]x[/red] :smile:" in shown and "[x]" in shown

"""What a command shows: coloured text, tables and progress with rich, plain text without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

Report = Callable[[int], None]
"""Told how much of a task is done, in the unit of its total."""


class CommandError(Exception):
    """Ends a command with one message for the user and exit code 1."""


class Screen(Protocol):
    """Where a command writes."""

    @property
    def has_colour(self) -> bool:
        """Whether styles can be seen."""

    def line(self, text: str = "", style: str = "") -> None:
        """Write one line."""

    def write(self, text: str, style: str = "") -> None:
        """Write text as it is, without a line end, and show it at once."""

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table, the first column to the left and the others to the right."""

    def result(self, data: Any) -> None:
        """Give a program what `line` and `table` tell people; nothing where people read."""

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Report]:
        """Show that something is under way; of a known `total` of a `unit`, how far it is."""


class PlainScreen:
    """Text alone: for pipes, files, and machines without rich."""

    has_colour = False

    def line(self, text: str = "", style: str = "") -> None:
        print(text, flush=True)

    def write(self, text: str, style: str = "") -> None:
        print(text, end="", flush=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [headers, *rows]
        widths = [max(len(cells[column]) for cells in lines) for column in range(len(headers))]
        for cells in lines:
            first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            self.line("  ".join([cells[0].ljust(len(first)), *others]))

    def result(self, data: Any) -> None:
        pass

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Report]:
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda done: None


class RichScreen:
    """Colours, tables and progress bars by rich."""

    has_colour = True

    def __init__(self) -> None:
        from rich.console import Console

        # Models write square brackets and colons too; they mean nothing here.
        self._out = Console(highlight=False, markup=False, emoji=False)
        self._err = Console(stderr=True, highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        self._out.print(text, style=style or None)

    def write(self, text: str, style: str = "") -> None:
        self._out.print(text, style=style or None, end="", soft_wrap=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD)
        for column, header in enumerate(headers):
            table.add_column(header, justify="right" if column else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        self._out.print(table)

    def result(self, data: Any) -> None:
        pass

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Report]:
        from rich import progress

        columns: list[Any] = [progress.SpinnerColumn(), progress.TextColumn("{task.description}")]
        if total is not None:
            columns.append(progress.BarColumn())
            is_size = unit == "bytes"
            columns.append(progress.DownloadColumn() if is_size else progress.MofNCompleteColumn())
        with progress.Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)


class JsonScreen:
    """One JSON object per result on stdout and nothing else there: for programs.

    Args:
        indent: As in `json.dumps`; None writes JSON lines.
    """

    has_colour = False

    def __init__(self, indent: int | None = 2) -> None:
        self._indent = indent
        self._tasks = _rich_or_plain(sys.stderr.isatty())

    def line(self, text: str = "", style: str = "") -> None:
        pass

    def write(self, text: str, style: str = "") -> None:
        pass

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        pass

    def result(self, data: Any) -> None:
        print(json.dumps(data, indent=self._indent), flush=True)

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Report]:
        with self._tasks.task(label, total, unit) as report:
            yield report


def open_screen(colour: bool | None = None) -> Screen:
    """The screen for this process.

    Args:
        colour: False asks for plain text; None takes colours where stdout is a terminal and rich is
            installed.
    """
    return _rich_or_plain(colour is not False and sys.stdout.isatty())


def _rich_or_plain(wants_rich: bool) -> Screen:
    if not wants_rich:
        return PlainScreen()
    try:
        return RichScreen()
    except ImportError:
        return PlainScreen()

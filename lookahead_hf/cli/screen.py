"""What a command shows: coloured text, tables and progress on a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Report = Callable[[int], None]
"""Takes how much of a task is done, in the unit of its total."""


class CommandError(Exception):
    """Ends a command with one message for the user and exit code 1."""


class Screen:
    """Where a command writes; this one writes plain text, for pipes and files."""

    has_colour = False

    def line(self, text: str = "", style: str = "") -> None:
        """Write one line."""
        self.write(f"{text}\n", style)

    def write(self, text: str, style: str = "") -> None:
        """Write text without a line end, and show it at once."""
        print(text, end="", flush=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table: the first column is aligned left, the others right."""
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        for first, *others in [headers, *rows]:
            aligned = map(str.rjust, others, widths[1:])
            self.line("  ".join([first.ljust(widths[0]), *aligned]))

    def result(self, data: Any) -> None:
        """Write what a program reads instead of lines and tables; people see nothing of it."""

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Report]:
        """Show that a task is under way and, with a `total` of a `unit`, how much of it is done."""
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda done: None


class RichScreen(Screen):
    """Colours, tables and progress bars of rich."""

    has_colour = True

    def __init__(self) -> None:
        from rich.console import Console

        # The texts of models contain square brackets and colons, which are not markup here.
        self._out = Console(highlight=False, markup=False, emoji=False)

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

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Report]:
        from rich import progress
        from rich.console import Console

        columns: list[Any] = [progress.SpinnerColumn(), progress.TextColumn("{task.description}")]
        if total is not None:
            is_size = unit == "bytes"
            columns.append(progress.BarColumn())
            columns.append(progress.DownloadColumn() if is_size else progress.MofNCompleteColumn())
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)


class PageScreen(RichScreen):
    """Collects what is shown, and writes it as one web page that needs no other file."""

    def __init__(self) -> None:
        from rich.console import Console

        unseen = io.StringIO()
        self._out = Console(
            highlight=False, markup=False, emoji=False, record=True, file=unseen, width=100
        )

    def save(self, file: Path) -> None:
        """Write the page.

        Raises:
            OSError: The file cannot be written.
        """
        self._out.save_html(str(file), inline_styles=True)


class JsonScreen(Screen):
    """Results as JSON on stdout and nothing else there, for programs.

    Args:
        indent: As in `json.dumps`; None writes JSON lines.
    """

    def __init__(self, indent: int | None = 2) -> None:
        self._indent = indent
        if sys.stderr.isatty():
            self.task = RichScreen().task  # type: ignore[method-assign]

    def write(self, text: str, style: str = "") -> None:
        """Write nothing, neither text nor lines and tables, which are written by this method."""

    def result(self, data: Any) -> None:
        print(json.dumps(data, indent=self._indent), flush=True)


def open_screen(is_plain: bool = False) -> Screen:
    """Return a screen with colours where stdout is a terminal, unless plain text is asked for."""
    return RichScreen() if sys.stdout.isatty() and not is_plain else Screen()


def write_any_character() -> None:
    """Let stdout replace the characters that its encoding lacks, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

"""Output of a command: its result on stdout, notes and progress beside it, by rich."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Report = Callable[[int], None]
"""Takes how much of a task is done."""

PIPE_WIDTH = 200
"""Columns of a table in a pipe or a file, where no terminal limits them."""


_LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""The texts of models contain square brackets and colons, which consoles must not interpret."""


class CommandError(Exception):
    """Ends a command with one message for the user and exit code 1."""


def check_installed(what: str, packages: Sequence[str], extra: str, otherwise: str = "") -> None:
    """Raise CommandError if a package is missing that `what` needs and that an extra brings."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        install = f"In a checkout of lookahead_hf: pip install '.[{extra}]'"
        raise CommandError(f"{what} needs {', '.join(missing)}.\n{install}\n{otherwise}".strip())


class Screen:
    """The place where a command writes.

    A terminal shows everything, in colours, unless it `is_plain`. A pipe or a file gets the result
    as plain text and nothing else; notes and progress then go to stderr.
    """

    def __init__(self, is_plain: bool = False) -> None:
        from rich.console import Console

        settings = {**_LITERAL, "soft_wrap": True, "force_terminal": False if is_plain else None}
        self._out, self._err = Console(**settings), Console(stderr=True, **settings)
        self.has_colour = self._out.is_terminal
        if not self.has_colour:
            self._out.width = PIPE_WIDTH

    @property
    def shows_progress(self) -> bool:
        """Whether a bar shows how far a task is."""
        return self._err.is_terminal

    def line(self, text: str = "", style: str = "") -> None:
        self.write(f"{text}\n", style)

    def write(self, text: str, style: str = "") -> None:
        """Write text of the result without a line end, and show it at once."""
        if self.has_colour:
            self._out.print(text, style=style or None, end="")
        else:  # rich would turn tabs into spaces
            print(text, end="", flush=True)

    def note(self, text: str, style: str = "", end: str = "\n") -> None:
        """Write what accompanies the result."""
        (self._out if self.has_colour else self._err).print(text, style=style or None, end=end)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table of the result: the first column is aligned left, the others right."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD if self.has_colour else None, pad_edge=False)
        for column, header in enumerate(headers):
            table.add_column(header, justify="right" if column else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        if self.has_colour:
            self._out.print(table)
            return
        with self._out.capture() as rendered:  # where a pipe has no reader, rich would exit with 1
            self._out.print(table)
        self.write(rendered.get())

    def result(self, data: Any) -> None:
        """Write what a program reads instead of text; people see nothing of it."""

    @contextmanager
    def task(
        self, label: str, total: int | None = None, unit: str | None = None
    ) -> Iterator[Report]:
        """Show that a task is under way and, with a `total`, how much of it is done.

        The total counts something, or is in "bytes" or, roughly known, in "seconds".
        """
        from rich import progress

        if not self.shows_progress:
            self._err.print(f"{label} ...")
            yield lambda done: None
            return
        columns: list[Any] = [progress.SpinnerColumn(), progress.TextColumn("{task.description}")]
        if total is not None:
            columns.append(progress.BarColumn())
            columns.append(
                progress.DownloadColumn()
                if unit == "bytes"
                else progress.TextColumn("{task.completed:.0f} of about {task.total:.0f} s")
                if unit == "seconds"
                else progress.MofNCompleteColumn()
            )
        with progress.Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)


class PageScreen(Screen):
    """Collects what is shown, and writes it as one web page that needs no other file."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        self._out = Console(record=True, file=io.StringIO(), width=100, **_LITERAL)
        self.has_colour = True

    def to_html(self) -> str:
        return self._out.export_html(inline_styles=True)


class JsonScreen(Screen):
    """Writes results as JSON on stdout and nothing else there; without `indent`, as JSON lines."""

    def __init__(self, indent: int | None = 2) -> None:
        super().__init__()
        self._indent = indent
        self._out.quiet = self.has_colour = True  # text and notes go to a console that is quiet

    def result(self, data: Any) -> None:
        print(json.dumps(_without_nan(data), indent=self._indent), flush=True)


def _without_nan(data: Any) -> Any:
    """Replace every nan, such as the rate of nothing, which JSON lacks, by None."""
    if isinstance(data, dict):
        return {name: _without_nan(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and math.isnan(data) else data


def write_any_character() -> None:
    """Let stdout replace the characters that its encoding lacks, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

"""Output of a command: its result on stdout, notes and progress on stderr."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class CommandError(Exception):
    """Ends a command with one message for the user and exit code 1."""


def check_installed(what: str, packages: Sequence[str], extra: str, otherwise: str = "") -> None:
    """Raise CommandError if a package is missing that `what` needs and that an extra brings."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        install = f"In a checkout of lookahead_hf: pip install '.[{extra}]'"
        raise CommandError(f"{what} needs {', '.join(missing)}.\n{install}\n{otherwise}".strip())


class Screen:
    """Where a command writes: text, in colours on a terminal, or with `as_json` data alone."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack characters
            sys.stdout.reconfigure(errors="replace")

    def line(self, text: str = "", **style: Any) -> None:
        self.write(f"{text}\n", **style)

    def write(self, text: str, **style: Any) -> None:
        """Write text of the result without a line end, in a style of `click.style`."""
        if self.as_json:
            return
        if style and self.has_colour:
            import click

            text = click.style(text, **style)
        print(text, end="", flush=True)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Write a table below its headers; the first column is aligned left, the others right."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            first, *others = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
            self.line("  ".join(cells))

    def result(self, data: Any) -> None:
        """Write data, as a line of JSON; people see nothing of it."""
        if self.as_json:
            data = json.loads(json.dumps(data), parse_constant=lambda name: None)  # NaN is null
            print(json.dumps(data), flush=True)

    def note(self, text: str) -> None:
        """Write what accompanies the result."""
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def task(self, label: str, total: int | None = None) -> Iterator[Callable[[], object]]:
        """Show that a task is under way; with a `total`, yield what counts a part as done."""
        if total is None or not sys.stderr.isatty():
            self.note(f"{label} ...")
            yield lambda: None
            return
        import click

        with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
            yield lambda: bar.update(1)

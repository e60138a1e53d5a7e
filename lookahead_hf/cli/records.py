"""Reads prompts and texts from files: lines of text, or JSON records."""

from __future__ import annotations

import json
from pathlib import Path

from lookahead_hf.cli.screen import CommandError


def read_lines(file: Path) -> list[tuple[str, str]]:
    """Return the lines of a file that are not blank, each with its place, or CommandError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{file} cannot be read ({reason}): name a text file in UTF-8."
        raise CommandError(message) from None
    return [(f"{file}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]


def is_record(file: Path, line: str) -> bool:
    return file.suffix == ".jsonl" or line.lstrip().startswith("{")


def text_of(record: str | bytes, field: str, where: str) -> str:
    """Return a field of a JSON record; dots in its name lead into nested objects.

    ValueError, which names the place `where`, if there is no such field with a text.
    """
    try:
        value = json.loads(record)
    except ValueError as error:
        raise ValueError(f"{where}: this is not JSON ({error})") from error
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{where}: no field {name!r}, only {known}; --field names another")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} is not a text; --field names another")
    return value

"""What the parsers of all commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_command(
    commands: Any, name: str, run: Callable[..., int], *, help: str, about: str, examples: str
) -> Any:
    """Add a command with its examples and `--json`.

    Args:
        commands: What `add_subparsers` returned.
        name: The command.
        run: Takes the arguments and a screen, returns the exit code.
        help: What it does, for the list of commands.
        about: What it does, for its own help.
        examples: Command lines that work.

    Returns:
        Its parser.
    """
    parser = commands.add_parser(
        name,
        help=help,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> int:
    """A count of at least 1."""
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def sampling(text: str) -> tuple[float, float]:
    """Temperature and top-p, as `0.7,0.95`."""
    temperature, top_p = map(float, text.split(","))
    return temperature, top_p

"""The command `lookahead-hf`, also `python -m lookahead_hf`. It needs the extra `[cli]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lookahead_hf.tools.cli.screen import CommandError, check_installed

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process, and turn failures into messages.

    Returns the exit code: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted.
    """
    try:
        check_installed("The command line", ("click",), "cli")
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("\nlookahead-hf: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CommandError, ImportError, OSError, ValueError) as error:  # what does not fit
        print(f"lookahead-hf: {error}", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    import click

    from lookahead_hf.tools.cli.commands import COMMANDS

    try:
        with COMMANDS.make_context("lookahead-hf", words) as context:
            COMMANDS.invoke(context)
            return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code

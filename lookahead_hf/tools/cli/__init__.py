"""The command `lookahead-hf`, also `python -m lookahead_hf`. It needs the extra `[cli]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process.

    Returns the exit code: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted.
    """
    from lookahead_hf.tools.cli.screen import CommandError, check_installed

    try:
        check_installed("The command line", ("click", "rich"), "cli")
    except CommandError as error:
        print(f"lookahead-hf: {error}", file=sys.stderr)
        return 1
    from lookahead_hf.tools.cli.table import run

    return run(argv)

"""The command `lookahead-hf`, also `python -m lookahead_hf`. It needs the extra `[cli]`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name; None takes them from the process.

    Returns:
        The exit code: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted.
    """
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"lookahead-hf: the command line needs {' and '.join(missing)}; install what is "
            'missing with: pip install "lookahead-hf[cli]"',
            file=sys.stderr,
        )
        return 1
    from lookahead_hf.cli.commands import run

    return run(argv)

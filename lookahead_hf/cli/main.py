"""Read the command line and run the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from lookahead_hf.cli import bench, chat, demo, env, generate, pool
from lookahead_hf.cli.parsing import Group, examples_of

_EPILOG = """\
examples:
  lookahead-hf demo
  lookahead-hf generate --model Qwen/Qwen3-0.6B "Write a haiku about caches"
  lookahead-hf bench --model Qwen/Qwen3-0.6B --prompts mine.txt
  lookahead-hf env > environment.txt

With --json, stdout holds the result as JSON (chat: one line per turn) and nothing else.

exit codes: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted
"""

COMMANDS = Group(
    "lookahead-hf",
    commands=[each.COMMAND for each in (demo, generate, chat, bench, pool, env)],
    params=[click.Option(["--no-colour"], is_flag=True, help="plain text on a terminal too")],
    help="Speculative decoding for transformers: the same text, faster.",
    epilog=examples_of(_EPILOG),
    no_args_is_help=False,
)
"""`lookahead-hf` with all its commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name; None takes them from the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: Help was asked for, with code 0, or the usage is wrong, with code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with COMMANDS.make_context("lookahead-hf", words) as context:
            return int(COMMANDS.invoke(context))
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None

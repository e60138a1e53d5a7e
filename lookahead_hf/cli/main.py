"""Read the command line and run the command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lookahead_hf.cli import bench, chat, demo, env, generate, pool
from lookahead_hf.cli.screen import CommandError, JsonScreen, Screen, open_screen

_EPILOG = """\
examples:
  lookahead-hf demo
  lookahead-hf generate --model Qwen/Qwen3-0.6B "Write a haiku about caches"
  lookahead-hf bench --model Qwen/Qwen3-0.6B --prompts mine.txt
  lookahead-hf env > environment.txt

With --json, stdout holds the result as JSON (chat: one line per turn) and nothing else.

exit codes: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `lookahead-hf` with all its commands."""
    parser = argparse.ArgumentParser(
        prog="lookahead-hf",
        description="Speculative decoding for transformers: the same text, faster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-colour", action="store_true", help="plain text on a terminal too")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, generate, chat, bench, pool, env):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name; None takes them from the process.

    Returns:
        The exit code.
    """
    arguments = build_parser().parse_args(argv)
    screen: Screen = open_screen(False if arguments.no_colour else None)
    if arguments.json:
        # Of a conversation, a program reads one turn after the other.
        screen = JsonScreen(indent=None if arguments.command == "chat" else 2)
    try:
        return int(arguments.run(arguments, screen))
    except CommandError as error:
        print(f"lookahead-hf: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

"""The command `lookahead-hf` with all its commands."""

from __future__ import annotations

import click

import lookahead_hf
from lookahead_hf.tools.cli.commands import env, pool, serve, speeds, texts
from lookahead_hf.tools.cli.options import as_written

_EPILOG = """\
examples:
  lookahead-hf demo
  lookahead-hf generate --model Qwen/Qwen3-0.6B "Write a haiku about caches"
  lookahead-hf analyze prompts.jsonl --model Qwen/Qwen3-0.6B
  lookahead-hf bench --model Qwen/Qwen3-0.6B --prompts mine.txt
  lookahead-hf env > environment.txt

Stdout holds the result alone, with --json as JSON; everything else is on stderr.

exit codes: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted
"""

_COMMANDS = [
    *(texts.DEMO, texts.GENERATE, texts.TRACE, serve.COMMAND, speeds.ANALYZE, speeds.BENCH),
    *(pool.COMMAND, env.COMPILE, env.ENV),
]

COMMANDS = click.version_option(lookahead_hf.__version__, prog_name="lookahead-hf")(
    click.Group(
        "lookahead-hf",
        commands=_COMMANDS,
        subcommand_metavar="|".join(str(each.name) for each in _COMMANDS) + " [ARGUMENTS]...",
        help="Speculative decoding for transformers: the same text, faster.",
        epilog=as_written(_EPILOG),
        no_args_is_help=False,
    )
)

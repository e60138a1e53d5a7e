"""Reads the command line, runs the command, and turns failures into messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from lookahead_hf.fallback import SpeculationFallbackError
from lookahead_hf.tools.cli.commands import (
    analyze,
    bench,
    compile,
    demo,
    env,
    generate,
    pool,
    serve,
    trace,
)
from lookahead_hf.tools.cli.loading import is_out_of_memory
from lookahead_hf.tools.cli.parsing import VERSION, as_written
from lookahead_hf.tools.cli.screen import CommandError, write_any_character

_EPILOG = """\
examples:
  lookahead-hf demo
  lookahead-hf generate --model Qwen/Qwen3-0.6B "Write a haiku about caches"
  lookahead-hf analyze prompts.jsonl --model Qwen/Qwen3-0.6B
  lookahead-hf bench --model Qwen/Qwen3-0.6B --prompts mine.txt
  lookahead-hf env > environment.txt

In a pipe or a file, stdout holds the text alone; everything else is on stderr. With --json, stdout
holds the result as JSON.

exit codes: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted
"""

_MODULES = (demo, generate, trace, serve, analyze, bench, pool, compile, env)
_COMMANDS = [module.COMMAND for module in _MODULES]

COMMANDS = click.Group(
    "lookahead-hf",
    commands=_COMMANDS,
    subcommand_metavar="|".join(str(each.name) for each in _COMMANDS) + " [ARGUMENTS]...",
    params=[click.Option(["--no-colour"], is_flag=True, help="plain text on a terminal too")],
    help="Speculative decoding for transformers: the same text, faster.",
    epilog=as_written(_EPILOG),
    no_args_is_help=False,
)
"""`lookahead-hf` with all its commands."""
VERSION(COMMANDS)


def run(argv: Sequence[str] | None) -> int:
    """Run one command and return the exit code; see `lookahead_hf.tools.cli.main`."""
    write_any_character()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with COMMANDS.make_context("lookahead-hf", words) as context:
            COMMANDS.invoke(context)
            return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CommandError as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        print("\nlookahead-hf: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or "no memory is left"
        remedy = "take a smaller model, --dtype bfloat16, or fewer --max-new-tokens"
        return _failed(f"out of memory, {remedy} ({reason})")
    except SpeculationFallbackError as error:
        return _failed(f"{error}\n`lookahead-hf env` lists all reasons.")
    except (ImportError, OSError, ValueError) as error:  # files and options that do not fit
        file, why = getattr(error, "filename", None), getattr(error, "strerror", None)
        return _failed(f"{file}: {why}" if file and why else str(error))


def _failed(message: str) -> int:
    print(f"lookahead-hf: {message}", file=sys.stderr)
    return 1

"""What the commands' lines have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import click

from lookahead_hf.cli.loading import is_out_of_memory
from lookahead_hf.cli.screen import CommandError, JsonScreen, Screen, open_screen

Arguments = SimpleNamespace
"""The values of a command's parameters, by name."""

Run = Callable[[Arguments, Screen], int]
"""What a command does: returns the exit code."""

OUT_OF_MEMORY = "Take a smaller model, --dtype bfloat16, or fewer --new-tokens."


class Group(click.Group):
    """Commands that are listed where a name is none of them."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click does."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = f"{error.message} There are {', '.join(self.commands)}."
            raise click.UsageError(known, ctx) from None


def command(
    name: str,
    run: Run,
    *,
    help: str,
    about: str,
    examples: str,
    params: Sequence[click.Parameter] = (),
    indent: int | None = 2,
) -> click.Command:
    """A command with its examples and `--json`.

    Args:
        name: The command.
        run: What it does.
        help: What it does, for the list of commands.
        about: What it does, for its own help.
        examples: Command lines that work.
        params: Its arguments and options.
        indent: Of what it writes as JSON; None writes one line per result.
    """
    as_json = click.Option(["--json"], is_flag=True, help="the result as JSON on stdout")

    @click.pass_context
    def call(context: click.Context, /, **values: Any) -> int:
        if values.pop("json"):
            return _guarded(run, Arguments(**values), JsonScreen(indent))
        colour = context.find_root().params["no_colour"]
        return _guarded(run, Arguments(**values), open_screen(False if colour else None))

    return click.Command(
        name,
        callback=call,
        params=[*params, as_json],
        short_help=help,
        help=about,
        epilog=examples_of(examples),
    )


def examples_of(text: str) -> str:
    """Text whose lines click leaves as they are."""
    return "\n\n".join(f"\b\n{part}" for part in text.strip("\n").split("\n\n"))


def _guarded(run: Run, arguments: Arguments, screen: Screen) -> int:
    """Run a command; what a user can do something about is one message."""
    try:
        return run(arguments, screen)
    except CommandError as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().partition("\n")[0] or "no memory is left"
        return _failed(f"out of memory ({said}). {OUT_OF_MEMORY}")


def _failed(message: str) -> int:
    print(f"lookahead-hf: {message}", file=sys.stderr)
    return 1


positive = click.IntRange(min=1)


class Sampling(click.ParamType):
    """Temperature and top-p, as `0.7,0.95`."""

    name = "T,TOP_P"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, float]:
        """The two numbers."""
        if isinstance(value, tuple):
            return value
        try:
            temperature, top_p = map(float, str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not two numbers, such as 0.7,0.95", param, ctx)
        if not 0 < temperature < float("inf"):
            self.fail(f"the temperature is {temperature:g}, but must be above 0; without --sample "
                      "decoding is greedy", param, ctx)  # fmt: skip
        if not 0 < top_p <= 1:
            self.fail(f"top-p is {top_p:g}, but must be above 0 and at most 1", param, ctx)
        return temperature, top_p

"""What the commands' lines have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import click

from lookahead_hf.cli.screen import JsonScreen, Screen, open_screen

Arguments = SimpleNamespace
"""The values of a command's arguments and options, by name."""

Run = Callable[[Arguments, Screen], None]
"""The body of a command."""

DTYPES = click.Choice(["float32", "bfloat16", "float16"])
POSITIVE = click.IntRange(min=1)


def command(name: str, examples: str, indent: int | None = 2) -> Callable[[Run], click.Command]:
    """Turn a function into a command with `--json`; its docstring is the command's help.

    Args:
        name: The command's name.
        examples: Command lines that work.
        indent: The indentation of the JSON; None writes one line per result.
    """

    def decorate(run: Run) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="the result as JSON on stdout")
        @click.pass_context
        def call(context: click.Context, /, as_json: bool, **values: Any) -> None:
            is_plain = context.find_root().params["no_colour"]
            run(Arguments(**values), JsonScreen(indent) if as_json else open_screen(is_plain))

        call.__click_params__ += getattr(run, "__click_params__", [])  # type: ignore[attr-defined]
        return click.command(name, help=run.__doc__, epilog=as_written(examples))(call)

    return decorate


def as_written(text: str) -> str:
    """Mark the paragraphs of a help text, so that click keeps their lines as they are."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip("\n").split("\n\n"))


def model_options(new_tokens: int) -> Callable[[Run], Run]:
    """Options of every command that generates."""
    return _all_of(
        click.option("--model", help="a folder or a hub name (default: SmolLM2-135M-Instruct)"),
        click.option("--new-tokens", type=POSITIVE, default=new_tokens, show_default=True),
        click.option("--threads", type=POSITIVE, help="torch's threads (default: torch chooses)"),
    )


def generation_options(new_tokens: int = 256) -> Callable[[Run], Run]:
    """Options of the commands that generate in one dtype, greedily or sampled."""
    return _all_of(
        model_options(new_tokens),
        click.option("--dtype", type=DTYPES, default="float32", show_default=True),
        click.option(
            "--sample",
            metavar="T,TOP_P",
            callback=_sampling,
            help="sample with this temperature and top-p (default: greedy decoding)",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="for --sample"),
    )


def _all_of(*options: Callable[[Run], Run]) -> Callable[[Run], Run]:
    """Several decorators as one; the help lists the options in this order."""
    return lambda run: reduce(lambda inner, option: option(inner), reversed(options), run)


def _sampling(context: Any, option: Any, value: str | None) -> tuple[float, float] | None:
    """Temperature and top-p, from `0.7,0.95`."""
    if value is None:
        return None
    try:
        temperature, top_p = map(float, value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not two numbers, such as 0.7,0.95") from None
    if not (0 < temperature < float("inf") and 0 < top_p <= 1):
        raise click.BadParameter(f"{value}: both must be above 0, and top-p at most 1")
    return temperature, top_p


def generation_arguments(arguments: Arguments) -> dict[str, Any]:
    """The arguments of `generate` that the options ask for."""
    chosen: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    if arguments.sample:
        temperature, top_p = arguments.sample
        chosen |= {"do_sample": True, "temperature": temperature, "top_p": top_p}
    return chosen

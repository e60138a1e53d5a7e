"""Options that several commands share, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

import lookahead_hf
from lookahead_hf.config import STRATEGIES, SpeculativeConfig
from lookahead_hf.tools.cli.screen import JsonScreen, Screen
from lookahead_hf.utils import known_names

Arguments = SimpleNamespace
"""The values of a command's arguments and options, by name."""

Run = Callable[[Arguments, Screen], None]
"""The body of a command."""

DTYPES = click.Choice(["float32", "bfloat16", "float16"])
POSITIVE = click.IntRange(min=1)
THREADS = click.IntRange(1, 1024)  # with many more, torch ends the process
SEEDS = click.IntRange(-(2**63), 2**63 - 1)  # `bench` adds to them; torch takes 64 bits
TOP_P = click.FloatRange(min=0, min_open=True, max=1)

VERSION = click.version_option(lookahead_hf.__version__, prog_name="lookahead-hf")


def command(name: str, examples: str, indent: int | None = 2) -> Callable[[Run], click.Command]:
    """Turn a function into a command with `--json` and `--version`; its docstring is the help.

    `examples` are shown below it. Without `indent`, the JSON has one line per result.
    """

    def decorate(run: Run) -> click.Command:
        @VERSION
        @click.option("--json", "as_json", is_flag=True, help="the result as JSON on stdout")
        @click.pass_context
        def call(context: click.Context, /, as_json: bool, **values: Any) -> None:
            is_plain = context.find_root().params["no_colour"]
            run(Arguments(**values), JsonScreen(indent) if as_json else Screen(is_plain))

        call.__click_params__ += getattr(run, "__click_params__", [])  # type: ignore[attr-defined]
        return click.command(name, help=run.__doc__, epilog=as_written(examples))(call)

    return decorate


def as_written(text: str) -> str:
    """Mark the paragraphs of a help text, so that click keeps their lines as they are."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip("\n").split("\n\n"))


def _all_of(*options: Callable[[Run], Run]) -> Callable[[Run], Run]:
    """Join several decorators; the help lists the options in this order."""
    return lambda run: reduce(lambda inner, option: option(inner), reversed(options), run)


def _config(context: Any, option: Any, value: str | None) -> SpeculativeConfig:
    """Read how to speculate: from JSON, from a file with JSON, or by a preset's name."""
    if value is None or value in STRATEGIES:
        return SpeculativeConfig.resolve(value or True) or SpeculativeConfig()
    try:
        is_json = value.lstrip().startswith("{")
        text = value if is_json else Path(value).read_text(encoding="utf-8")
        return SpeculativeConfig.from_dict(json.loads(text))
    except FileNotFoundError:
        known = known_names(value, STRATEGIES)
        raise click.BadParameter(f"{value} is no file, no JSON and no preset; {known}") from None
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error)) from error


NEW_FILE = click.File("w", encoding="utf-8", lazy=False)
"""A file to write, opened at once, so that a wrong path is reported before any work is done."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

CONFIG = click.option(
    "--config",
    callback=_config,
    metavar="JSON|FILE",
    help="a preset, or fields of a SpeculativeConfig",
)

POOL = click.option("--pool", type=FILE, help="draft from this pool too; see `pool build`")

DTYPE = click.option(
    "--dtype", type=DTYPES, default="float32", show_default=True, help="of the model's weights"
)

BATCH_SIZE = click.option(
    "--batch-size", type=POSITIVE, default=1, show_default=True, help="prompts per call"
)

DRAFTING = _all_of(
    CONFIG,
    POOL,
    click.option("--prediction", type=FILE, help="a text like the expected answer"),
    click.option("--assistant", metavar="MODEL", help="a small model that drafts too"),
)
"""Options of how to speculate; `open_stage` reads them."""

SAMPLING = _all_of(
    click.option(
        "--temperature", type=click.FloatRange(min=0), help="above 0 samples (default: greedy)"
    ),
    click.option("--top-p", type=TOP_P, help="sample from the likeliest tokens of this total"),
    click.option("--seed", type=SEEDS, default=0, show_default=True, help="for sampling"),
)
"""Options of how to sample; `generation_arguments` reads them."""


def model_options(new_tokens: int) -> Callable[[Run], Run]:
    return _all_of(
        click.option("--model", help="a folder or a hub name (default: SmolLM2-135M-Instruct)"),
        click.option("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)"),
        click.option(
            "--max-new-tokens",
            "--new-tokens",
            "new_tokens",
            type=POSITIVE,
            default=new_tokens,
            show_default=True,
            help="the most tokens of a text",
        ),
        click.option("--threads", type=THREADS, help="torch's threads (default: torch chooses)"),
    )


def generation_options(new_tokens: int = 256) -> Callable[[Run], Run]:
    """Return options of commands that generate in one dtype, whether they draft or sample."""
    return _all_of(model_options(new_tokens), DTYPE, DRAFTING, SAMPLING)


def generation_arguments(arguments: Arguments) -> dict[str, Any]:
    temperature, top_p = arguments.temperature, arguments.top_p
    chosen: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    if temperature == 0 or temperature is top_p is None:
        return chosen
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    return chosen | {name: value for name, value in sampling.items() if value is not None}


def with_pool(config: SpeculativeConfig, file: Path | None) -> SpeculativeConfig:
    """Return the configuration with its pool opened, which is in `file` or where it says."""
    from lookahead_hf.ngram_pool.pool import open_pool

    named = file or config.pool
    return config if named is None else replace(config, pool=open_pool(named))

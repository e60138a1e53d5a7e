"""Options that several commands share, and the files that they name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from lookahead_hf.config import STRATEGIES, SpeculativeConfig
from lookahead_hf.tools.cli.screen import CommandError, Screen

Run = Callable[[SimpleNamespace, Screen], None]
"""The body of a command; it gets the values of the arguments and options by name."""

DTYPES = click.Choice(["float32", "bfloat16", "float16"])
POSITIVE = click.IntRange(min=1)

NEW_FILE = click.File("w", encoding="utf-8", lazy=False)
"""A file to write, opened at once, so that a wrong path is reported before any work is done."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def command(name: str, examples: str) -> Callable[[Run], click.Command]:
    """Turn a function into a command with `--json`; its docstring and `examples` are the help."""

    def decorate(run: Run) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="the result as JSON on stdout")
        def call(as_json: bool, **values: Any) -> None:
            run(SimpleNamespace(**values), Screen(as_json))

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
    """Read how to speculate: by a preset's name, from JSON, or from a file with JSON."""
    if value is None or value in STRATEGIES:
        return SpeculativeConfig.resolve(value or True) or SpeculativeConfig()
    try:
        text = value if value.lstrip().startswith("{") else Path(value).read_text(encoding="utf-8")
        return SpeculativeConfig.from_dict(json.loads(text))
    except (OSError, ValueError) as error:
        known = f"it takes JSON, a file with JSON, or one of {', '.join(STRATEGIES)}"
        raise click.BadParameter(f"{error}; {known}") from error


CONFIG = click.option(
    "--config",
    callback=_config,
    metavar="JSON|FILE",
    help="a preset, or fields of a SpeculativeConfig",
)

BATCH_SIZE = click.option(
    "--batch-size", type=POSITIVE, default=1, show_default=True, help="prompts per call"
)

DRAFTING = _all_of(
    CONFIG,
    click.option("--pool", type=FILE, help="draft from this pool too; see `pool build`"),
    click.option("--prediction", type=FILE, help="a text like the expected answer"),
    click.option("--assistant", metavar="MODEL", help="a small model that drafts too"),
)
"""Options of how to speculate; `open_stage` reads them."""

SAMPLING = _all_of(
    click.option(
        "--temperature", type=click.FloatRange(min=0), help="above 0 samples (default: greedy)"
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, min_open=True, max=1),
        help="sample from the likeliest tokens of this total",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**62),  # `bench` adds to it
        default=0,
        show_default=True,
        help="for sampling",
    ),
)
"""Options of how to sample; `generation_arguments` reads them."""


def dtype_option(**settings: Any) -> Callable[[Run], Run]:
    """Return the option `--dtype`; `settings` are those of `click.option`."""
    return click.option("--dtype", type=DTYPES, show_default=True, **settings)


def model_options(new_tokens: int) -> Callable[[Run], Run]:
    """Return options of commands that load a model and write texts of so many tokens."""
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
    )


def generation_options(new_tokens: int = 256) -> Callable[[Run], Run]:
    """Return options of commands that generate in one dtype, whether they draft or sample."""
    dtype = dtype_option(default="float32", help="of the model's weights")
    return _all_of(model_options(new_tokens), dtype, DRAFTING, SAMPLING)


def generation_arguments(arguments: SimpleNamespace) -> dict[str, Any]:
    """Return the arguments of `generate` that a command's options ask for."""
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


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the lines of a file that are not blank, each as its place and its record.

    A line is a JSON record if it begins with a brace or the file's name ends in .jsonl, and
    otherwise a text. CommandError if it is not the JSON of an object.
    """
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(map(str.strip, lines), 1):
            where = f"{file}, line {number}"
            if line and (file.suffix == ".jsonl" or line.startswith("{")):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise CommandError(f"{where}: this is not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise CommandError(f"{where}: this is not a JSON object")
                yield where, record
            elif line:
                yield where, line

"""`lookahead-hf serve`: transformers' own server, with speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.tools.cli.models import warm_up
from lookahead_hf.tools.cli.options import CONFIG, as_written, with_pool
from lookahead_hf.tools.cli.screen import CommandError, Screen, check_installed
from lookahead_hf.tools.serving.fields import Limits

NEEDS = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client")
"""Packages of the extra `[serve]`, as they are imported."""

_EXAMPLES = """\
examples:
  lookahead-hf serve Qwen/Qwen3-0.6B
  lookahead-hf serve ./model --port 9000 --device cuda --dtype bfloat16
  LOOKAHEAD_HF_API_KEY=... lookahead-hf serve ./model --host 0.0.0.0 --max-waiting 64
  lookahead-hf serve ./model --pool code=code.safetensors --config '{"max_draft_nodes": 32}'

All other options, such as --host, --port, --device and --dtype, are those of `transformers serve`,
whose --help explains them.
"""


def _limits(command: Callable[..., None]) -> Callable[..., None]:
    for each in reversed(dataclasses.fields(Limits)):
        is_whole = isinstance(each.default, int) or each.default is None
        command = click.option(
            f"--max-{each.name.replace('_', '-')}",
            type=click.IntRange(min=1) if is_whole else click.FloatRange(min=0, min_open=True),
            default=each.default,
            show_default=each.default is not None,
            help=f"Most {each.metadata['what']}.",
        )(command)
    return command


@click.command(
    "serve",
    epilog=as_written(_EXAMPLES),
    context_settings={"ignore_unknown_options": True},
    options_metavar="MODEL [OPTIONS]",
)
@CONFIG
@click.option(
    "--pool",
    "files",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Draft from this pool too; one with a name only for requests that give the name.",
)
@click.option(
    "--api-key",
    envvar="LOOKAHEAD_HF_API_KEY",
    show_envvar=True,
    help="What clients have to send as their API key; others see it in a list of processes.",
)
@click.option(
    "--continuous-batching/--no-continuous-batching",
    "together",
    default=True,
    show_default=True,
    help="Decode requests together, or one after the other.",
)
@_limits
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
def COMMAND(
    config: SpeculativeConfig,
    files: tuple[str, ...],
    api_key: str | None,
    together: bool,
    words: tuple[str, ...],
    **limits: Any,
) -> None:
    """Serve a model over HTTP.

    This is the server of transformers; it generates speculatively. OpenAI's API is below /v1, and
    counters are at /metrics. MODEL is a folder or a name of the Hugging Face hub.
    """
    check_installed("The server", NEEDS, "serve")
    import typer
    from transformers.cli.serve import Serve

    from lookahead_hf.ngram_pool.pool import open_pool
    from lookahead_hf.tools.serving.server import UnknownServerError, ending_at_once, speculating

    program = typer.Typer(add_completion=False)
    program.command()(Serve)
    command = typer.main.get_command(program)
    own: dict[str, Any] = {"api_key": api_key or None, "together": together}
    screen, pools = Screen(), {}
    if not api_key:
        screen.note("Without --api-key, whoever reaches the port is answered.")
    try:
        own["limits"] = Limits(**{name.removeprefix("max_"): each for name, each in limits.items()})
        for each in files:
            name, _, file = each.rpartition("=")
            pools[name] = open_pool(file)
        config = with_pool(dataclasses.replace(config, pool=pools.pop("", config.pool)), None)
        with speculating(config, partial(warm_up, screen), pools=pools, **own), ending_at_once():
            command([*words], prog_name="lookahead-hf serve")
    except SystemExit as end:
        if end.code:
            raise click.exceptions.Exit(int(end.code)) from None
    except (UnknownServerError, ImportError, OSError, ValueError) as error:
        raise CommandError(f"The server did not start: {error}") from error

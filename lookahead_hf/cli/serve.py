"""`lookahead-hf serve`: transformers' own server, with speculation."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import click

from lookahead_hf.cli.loading import check_name
from lookahead_hf.cli.parsing import CONFIG, POOL, VERSION, as_written, with_pool
from lookahead_hf.cli.screen import CommandError, Screen
from lookahead_hf.config import SpeculativeConfig

NEEDS = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client")
"""Packages of the extra `[serve]`, as they are imported."""

_EXAMPLES = """\
examples:
  lookahead-hf serve Qwen/Qwen3-0.6B
  lookahead-hf serve ./model --port 9000 --device cuda --dtype bfloat16
  lookahead-hf serve ./model --pool code.safetensors --config '{"max_draft_nodes": 32}'

All other options, such as --host, --port, --device and --dtype, are those of `transformers serve`,
whose --help explains them.
"""


@click.command(
    "serve",
    epilog=as_written(_EXAMPLES),
    context_settings={"ignore_unknown_options": True},
    options_metavar="[MODEL] [OPTIONS]",
)
@VERSION
@CONFIG
@POOL
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_context
def COMMAND(
    context: click.Context, config: SpeculativeConfig, pool: Path | None, words: tuple[str, ...]
) -> None:
    """Serve a model over HTTP.

    This is the server of transformers; it generates speculatively. OpenAI's API is below /v1, and
    counters are at /metrics. MODEL is a folder or a name of the Hugging Face hub; without it,
    requests choose.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"The server needs {', '.join(missing)}.\n"
            'Install what is missing with: pip install "lookahead-hf[serve]"'
        )
    is_plain = context.find_root().params.get("no_colour", False)
    _serve(list(words), with_pool(config, pool), Screen(is_plain))


def _check_address(host: str | None, port: int | None) -> None:
    """Raise CommandError if nothing can listen there, before a model is loaded in vain."""
    if host is None or port is None:
        return
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(
            f"The server cannot listen on {host}:{port} ({reason}): --host and --port take others."
        ) from error


def _serve(words: list[str], config: SpeculativeConfig, screen: Screen) -> None:
    """Run transformers' command with these words until the server is stopped."""
    import typer
    from transformers.cli.serve import Serve

    import lookahead_hf
    from lookahead_hf.serving.server import UnknownServerError, speculating

    def warm_up(model: Any) -> None:
        with screen.task("warming up: compiling (once per installation) and measuring"):
            lookahead_hf.warm_up(model)

    program = typer.Typer(add_completion=False)
    program.command()(Serve)
    command = typer.main.get_command(program)
    parsed = command.make_context("serve", [*words], resilient_parsing=True)
    if name := parsed.params.get("force_model"):
        check_name(name.partition("@")[0], "MODEL")  # what follows is a revision
    _check_address(parsed.params.get("host"), parsed.params.get("port"))
    try:
        with speculating(config, warm_up):
            command(words, prog_name="lookahead-hf serve")
    except SystemExit as end:
        if end.code:
            raise click.exceptions.Exit(int(end.code)) from None
    except (UnknownServerError, ImportError, OSError, ValueError) as error:
        raise CommandError(f"The server did not start: {error}") from error

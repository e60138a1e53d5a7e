"""`lookahead-hf serve`: transformers' own server, with speculation."""

from __future__ import annotations

import errno
import os
import socket
from functools import partial
from pathlib import Path

import click

from lookahead_hf.config import SpeculativeConfig
from lookahead_hf.tools.cli.loading import check_name, warm_up
from lookahead_hf.tools.cli.parsing import CONFIG, POOL, VERSION, as_written, with_pool
from lookahead_hf.tools.cli.screen import CommandError, Screen, check_installed

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
    check_installed("The server", NEEDS, "serve")
    is_plain = context.find_root().params.get("no_colour", False)
    _serve(list(words), with_pool(config, pool), Screen(is_plain))


def _check_port(host: str | None, port: int | None) -> None:
    """Raise CommandError if a port is taken or forbidden, before a model is loaded in vain."""
    if port is None:  # which transformers refuses
        return
    if not 0 <= port < 2**16:
        raise CommandError(f"--port takes a number from 0 to 65535, not {port}.")
    hosts = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)  # "" stands for all
    for family, *_, address in hosts:
        try:
            socket.create_server((address[0], port), family=family).close()
        except OSError as error:  # of addresses that this machine lacks, the server knows more
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why = os.strerror(error.errno)
                raise CommandError(
                    f"The server cannot listen on {host}:{port} ({why}): --port takes another port."
                ) from error


def _serve(words: list[str], config: SpeculativeConfig, screen: Screen) -> None:
    """Run transformers' command with these words until the server is stopped."""
    import typer
    from transformers.cli.serve import Serve

    from lookahead_hf.tools.serving.server import UnknownServerError, speculating

    program = typer.Typer(add_completion=False)
    program.command()(Serve)
    command = typer.main.get_command(program)
    parsed = command.make_context("serve", [*words], resilient_parsing=True)
    if name := parsed.params.get("force_model"):
        check_name(name.partition("@")[0], "MODEL")  # what follows is a revision
    try:
        _check_port(parsed.params.get("host"), parsed.params.get("port"))
        with speculating(config, partial(warm_up, screen)):
            command(words, prog_name="lookahead-hf serve")
    except SystemExit as end:
        if end.code:
            raise click.exceptions.Exit(int(end.code)) from None
    except (UnknownServerError, ImportError, OSError, ValueError) as error:
        raise CommandError(f"The server did not start: {error}") from error

"""`lookahead-hf compile`: numba's functions, compiled before the first call needs them."""

from __future__ import annotations

import time

import click

from lookahead_hf.ngram_pool import compilation
from lookahead_hf.tools.cli.loading import wait_for_functions
from lookahead_hf.tools.cli.parsing import DTYPES, Arguments, command
from lookahead_hf.tools.cli.screen import Screen

_EXAMPLES = """\
examples:
  lookahead-hf compile
  lookahead-hf compile --dtype bfloat16
  NUMBA_CACHE_DIR=/opt/compiled lookahead-hf compile
"""


@command("compile", _EXAMPLES)
@click.option(
    "--dtype",
    type=DTYPES,
    multiple=True,
    default=["bfloat16", "float32"],
    show_default=True,
    help="of the models; may be given several times",
)
def COMMAND(arguments: Arguments, screen: Screen) -> None:
    """Compile what speculation needs, once per installation.

    Otherwise another process compiles it beside the first calls, which decode plainly. The code is
    kept beside the package or, if that folder is read-only, in the user's cache folder.
    """
    import torch

    # These say what there is to compile.
    import lookahead_hf.drafting.registry  # noqa: F401
    from lookahead_hf.engines.cpu.kernels.program import groups_of

    groups = [*groups_of(getattr(torch, each) for each in arguments.dtype), compilation.drafting]
    start = time.monotonic()
    if screen.shows_progress:
        wait_for_functions(screen, groups)
    else:
        compilation.wait(groups)
    for each in groups:
        each.check_available()
    seconds = time.monotonic() - start
    screen.result({"groups": [each.name for each in groups], "seconds": seconds})
    if screen.shows_progress:
        screen.note(f"everything is compiled ({seconds:.0f} s)")

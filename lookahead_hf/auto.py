"""Importing this module enables speculation for every model of the process.

Calls then take `speculative=`. With LOOKAHEAD_HF=1 in the environment they speculate without it;
`speculative=False` in a call still turns it off. The name of a preset chooses other drafters.

For a program that does not import it, run

    python -m lookahead_hf.auto [--speculative] PROGRAM [argument ...]

PROGRAM is a command that a package installs, a module, or a file that ends in .py. `--speculative`
does what LOOKAHEAD_HF=1 does.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from lookahead_hf.config import STRATEGIES
from lookahead_hf.hook import enable_everywhere
from lookahead_hf.utils import known_names

_SWITCHES = {"": None, "0": False, "1": True}
_value = os.environ.get("LOOKAHEAD_HF", "")

if _value not in (*_SWITCHES, *STRATEGIES):
    raise ValueError(
        f"LOOKAHEAD_HF={_value}: set it to 1, 0 or a preset; {known_names(STRATEGIES)}"
    )
enable_everywhere(default=_SWITCHES.get(_value, _value))


def run_program(words: Sequence[str]) -> None:
    """Run a program in this process, where every model takes `speculative=`.

    `words` are the program's name and its arguments, after `--speculative` if that is wanted.
    """
    if words[:1] == ["--speculative"]:
        enable_everywhere(default=True)
        words = words[1:]
    if not words or words[0].startswith("-"):
        raise SystemExit(
            "usage: python -m lookahead_hf.auto [--speculative] PROGRAM [argument ...]"
        )
    name = words[0]
    sys.argv = list(words)
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")
        return
    for command in entry_points(group="console_scripts", name=name):
        raise SystemExit(command.load()())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_program(sys.argv[1:])

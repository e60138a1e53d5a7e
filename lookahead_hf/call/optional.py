"""Finds modules that the core works without; none is imported before a call can use it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

MODULES = {
    "cpu": "lookahead_hf.engines.cpu.layers",
    "cpu kernels": "lookahead_hf.engines.cpu.kernels.program",
    "cuda": "lookahead_hf.engines.cuda.runner",
    "recurrent states": "lookahead_hf.engines.hybrid",
    "grammar": "lookahead_hf.sources.grammar",
    "processes": "lookahead_hf.distributed",
    "continuous batching": "lookahead_hf.queue.methods",
    "pages of a trace": "lookahead_hf.tools.trace",
}
"""Modules by name. An engine that runs steps has the name of its device; see `runner.host`."""


def find(name: str) -> ModuleType | None:
    """Return a module of `MODULES`, None if it is not installed or not in the table."""
    return _imported(MODULES.get(name, ""))


def load(name: str) -> ModuleType:
    """Return a module of `MODULES` that a caller asks for; ModuleNotFoundError without it."""
    return import_module(MODULES[name])


@cache
def _imported(path: str) -> ModuleType | None:
    try:
        return import_module(path) if path else None
    except ModuleNotFoundError as error:
        if not path.startswith(error.name or "?"):  # something that it imports is missing
            raise
        return None

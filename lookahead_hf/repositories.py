"""Functions that a model's own repository puts in the place of `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any


def hands_on(function: Callable[..., Any]) -> bool:
    """Whether a function hands the arguments it is given on to a `generate`, which decodes.

    Read off its code, before anything runs: it takes arguments by any name, calls something that is
    named `generate`, and says nothing of a strategy itself. A function that decodes in a loop of
    its own would give an argument that it does not know to the model's forward.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, CodeType) or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    said = {*code.co_names, *code.co_varnames, *_texts(code.co_consts)}
    return "generate" in code.co_names and "custom_generate" not in said


def _texts(constants: Iterable[Any]) -> set[str]:
    """Strings among constants; names of keyword arguments stand in tuples."""
    found: set[str] = set()
    for value in constants:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, tuple):
            found |= _texts(value)
    return found

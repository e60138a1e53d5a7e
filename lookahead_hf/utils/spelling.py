"""Says which known name a misspelt one may stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

LIKENESS = 0.7
"""How similar a name must be to a known one to count as misspelt, from 0 to 1, as in `difflib`."""


def nearest(name: Any, known: Iterable[Any]) -> str | None:
    """Return the known name most similar to a given one, None if none is similar."""
    import difflib  # only needed for errors

    names = [each for each in known if isinstance(each, str)]
    return next(iter(difflib.get_close_matches(str(name).lower(), names, 1, LIKENESS)), None)


def known_names(name: Any, known: Iterable[Any]) -> str:
    """Return the end of an error about an unknown name: a suggestion, and all known names."""
    known = list(known)
    meant = nearest(name, known)
    hint = "" if meant is None else f"did you mean {meant!r}? "
    return f"{hint}known: {', '.join(map(str, known))}"


def check_names(
    title: str, given: Iterable[Any], known: Iterable[str], kind: type[Exception] = TypeError
) -> None:
    """Raise an error of a kind, with a suggestion, if `title` has no argument of a given name."""
    known = [*known]
    for name in given:
        if name not in known:
            raise kind(f"{title} has no argument {name!r}; {known_names(name, known)}")


def spelt_right(function: _Function) -> _Function:
    """Let a function suggest the right name if it gets an unknown argument (TypeError)."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    title = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_names(title, kwargs, names)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]

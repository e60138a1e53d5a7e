"""What a name that is not known was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LIKENESS = 0.7
"""How much a name must resemble another one to count as misspelt, from 0 to 1, as in `difflib`."""


def nearest(name: Any, known: Iterable[Any]) -> str | None:
    """Return the known name that a given one resembles most, None if it resembles none."""
    import difflib  # which no call needs that is spelt right

    names = [each for each in known if isinstance(each, str)]
    return next(iter(difflib.get_close_matches(str(name).lower(), names, 1, LIKENESS)), None)


def known_names(name: Any, known: Iterable[Any]) -> str:
    """Return the end of an error about a name that is not known: what was meant, and all names."""
    known = list(known)
    meant = nearest(name, known)
    hint = "" if meant is None else f"did you mean {meant!r}? "
    return f"{hint}known: {', '.join(map(str, known))}"

"""Drafter objects that several calls may name: each is lent to one call at a time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from lookahead_hf.drafting.drafter import Drafter

_lock = threading.Lock()
_borrowers: WeakKeyDictionary[Drafter, ref[Any]] = WeakKeyDictionary()
"""Who has each drafter just now; one that is gone without giving it back has it no more."""


def take(borrower: Any, sources: Sequence[Drafter]) -> list[Drafter]:
    """Lend sources to a call.

    An object that the caller gave may be in two calls at once, of two threads or of a call and a
    processor in it. What it holds is one call's, and its arrays fit that call's rows.

    Args:
        borrower: What has them until `give_back`, or as long as it lives.
        sources: What is to be had.

    Returns:
        Those that nobody has; of the others a warning says so.
    """
    lent, missing = list[Drafter](), list[Drafter]()
    with _lock:
        for source in sources:
            holder = _borrowers.get(source)
            is_free = holder is None or holder() is None
            (lent if is_free else missing).append(source)
        _borrowers.update((source, ref(borrower)) for source in lent)
    for source in missing:
        warnings.warn(
            f"the drafter object {source.name!r} drafts for another call at this moment and is "
            "left out of this one: an object serves one call at a time. Give every call an object "
            f"of its own, or the name {source.name!r} instead, by which every call makes one",
            RuntimeWarning,
            stacklevel=3,
        )
    return lent


def give_back(sources: Sequence[Drafter]) -> None:
    """Leave a call's sources to others."""
    with _lock:
        for source in sources:
            _borrowers.pop(source, None)

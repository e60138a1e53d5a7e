"""Splits the work for the rows of a batch between threads.

Compiled functions let go of the interpreter's lock, so parts of a batch run at the same time.
numba's own threads would do the same, but two calls of a process must not use them at once, and
neither may a forked process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

import numpy as np

from lookahead_hf.draft import DraftTree, Evidence

T = TypeVar("T")

MOST_PARTS = 4
"""Most threads that share a piece of work; handing it over takes longer for each."""

_pool: ThreadPoolExecutor | None = None


def in_parts(work: Callable[[slice], T], size: int, least: int) -> list[T]:
    """Run work on consecutive parts of a batch, in as many threads as torch uses.

    Args:
        work: Does a part of the work, in compiled functions for the most part.
        size: What there is to do, for instance the number of rows.
        least: Smallest part that is worth a thread.

    Returns:
        The results in the order of the parts; one part if threads do not pay.
    """
    import torch

    count = max(1, min(size // least, torch.get_num_threads(), MOST_PARTS))
    bounds = [size * part // count for part in range(count + 1)]
    parts = [slice(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
    begun: list[Future[T]] = []
    with suppress(RuntimeError):  # no thread can be started, or the interpreter is ending
        for part in parts[1:]:
            begun.append(_threads().submit(work, part))
    try:
        done = [work(parts[0]), *map(work, parts[1 + len(begun) :])]
    finally:
        wait(begun)
    return [done[0], *(future.result() for future in begun), *done[1:]]


def trees_in_parts(grow: Callable[[slice], DraftTree], num_rows: int, least: int) -> DraftTree:
    """Grow the trees of a batch in parts; see `in_parts`.

    Args:
        grow: Returns the trees of some rows, with evidence.
        num_rows: Rows of the batch.
        least: Fewest rows that are worth a thread.
    """
    parts = in_parts(grow, num_rows, least)
    if len(parts) == 1:
        return parts[0]
    evidence = [part.evidence for part in parts if part.evidence is not None]
    return DraftTree(
        _joined_offsets([part.row_offsets for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.parents for part in parts]),
        np.concatenate([part.depth for part in parts]),
        np.concatenate([part.score for part in parts]),
        Evidence(
            _joined_offsets([each.offsets for each in evidence]),
            np.concatenate([each.source for each in evidence]),
            np.concatenate([each.bucket for each in evidence]),
        ),
    )


def _joined_offsets(offsets: list[np.ndarray]) -> np.ndarray:
    """The offsets of arrays that are laid one after the other."""
    joined: np.ndarray = np.concatenate([[0], *map(np.diff, offsets)]).cumsum()
    return joined


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(MOST_PARTS - 1, "lookahead-hf-rows")
    return _pool


def _forget_threads() -> None:
    """Begin anew in a forked process, which has none of the threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)

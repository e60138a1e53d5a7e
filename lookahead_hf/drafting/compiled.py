"""Which drafting functions run: numba's or, where numba is missing, their plain twins."""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from types import ModuleType

import numpy as np

from lookahead_hf import ngram_pool
from lookahead_hf.drafting import reference
from lookahead_hf.ngram_pool.compilation import register

_is_said = False


def functions() -> ModuleType:
    """The module with the tree and calibration functions, importing numba on first use."""
    return reference if ngram_pool.failed() else _fastest()


@functools.cache
def _fastest() -> ModuleType:
    try:
        from lookahead_hf.drafting import _numba
    except Exception:  # numba is missing or does not work
        return reference
    return _numba


def compile_or_say() -> None:
    """Compile what is not compiled yet; where that cannot be done, calls go on without it."""
    with suppress(Exception):
        ngram_pool.compile_now()
    try:
        ngram_pool.check_available()
    except ngram_pool.NumbaMissingError as error:
        say_once(error)


def say_once(error: ngram_pool.NumbaMissingError) -> None:
    """Warn that there are no indexes to draft from, once in a process."""
    global _is_said
    if not _is_said:
        _is_said = True
        warnings.warn(
            f"the drafters 'ngram', 'recycling' and 'pool' are left out of calls: {error}",
            RuntimeWarning,
            stacklevel=4,
        )


def _warm_up() -> None:
    """Draft a step from logits of both widths, as every call does."""
    import torch

    from lookahead_hf.draft import Verdict
    from lookahead_hf.drafting.calibration import Calibration
    from lookahead_hf.drafting.ensemble import Ensemble
    from lookahead_hf.drafting.sources.recycling import RecyclingDrafter
    from lookahead_hf.drafting.tree import head
    from lookahead_hf.rows import Rows

    for dtype in (torch.bfloat16, torch.float32):
        source = RecyclingDrafter(top_k=2, capacity=4)
        ensemble = Ensemble([source], Calibration([source]))
        rows = Rows(np.zeros((1, 2), np.int64))
        rows.emit(0, 0)
        ensemble.begin(rows)
        for _ in range(2):
            draft = head(ensemble.propose(rows, 2), 1)
            verdict = Verdict.from_rows([[1]], [[]])
            rows.emit(0, 1)
            logits = torch.zeros(1, 1 + draft.num_nodes, 3, dtype=dtype)
            ensemble.observe(rows, draft, verdict, logits)
        ensemble.end(rows)


register(_warm_up)

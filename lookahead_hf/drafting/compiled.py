"""Which drafting functions run: numba's or, where numba is missing, their plain twins."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import numpy as np

from lookahead_hf.ngram_pool.compilation import register


@functools.cache
def has_numba() -> bool:
    """Whether compiled functions can be had at all."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def functions() -> ModuleType:
    """The module with the tree and calibration functions, importing numba on first use."""
    if has_numba():
        from lookahead_hf.drafting import _numba as compiled

        return compiled
    from lookahead_hf.drafting import reference

    return reference


def _warm_up() -> None:
    """Draft a step from logits of both widths, as every call does."""
    import torch

    from lookahead_hf.drafting.calibration import Calibration
    from lookahead_hf.drafting.ensemble import Ensemble
    from lookahead_hf.drafting.recycling import RecyclingDrafter
    from lookahead_hf.drafting.tree import head
    from lookahead_hf.rows import Rows
    from lookahead_hf.steps import Verdict

    for dtype in (torch.bfloat16, torch.float32):
        source = RecyclingDrafter(top_k=2, capacity=4)
        ensemble = Ensemble([source], Calibration([source]))
        rows = Rows(np.zeros((1, 2), np.int64))
        rows.emit(0, 0)
        ensemble.begin(rows)
        for _ in range(2):
            draft = head(ensemble.propose(rows, 2), 1)
            verdict = Verdict(
                np.array([0, 1]), np.array([1]), np.array([0, 0]), np.empty(0, np.int32),
                np.array([True]), np.array([False]),
            )  # fmt: skip
            rows.emit(0, 1)
            logits = torch.zeros(1, 1 + draft.num_nodes, 3, dtype=dtype)
            ensemble.observe(rows, draft, verdict, logits)
        ensemble.end(rows)


register(_warm_up)

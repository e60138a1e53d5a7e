"""The memory of drafting for a model between calls."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from lookahead_hf import ngram_pool
from lookahead_hf.drafting.control.calibration import KeptRates
from lookahead_hf.drafting.control.cost_model import CostModel
from lookahead_hf.drafting.sources.grammar.vocabulary import Vocabulary
from lookahead_hf.model_state import kept

OWN_POOL_TOKENS = 1_000_000

KEEP_EVERY = 60.0
"""Seconds in which calls write measured costs to disk once."""

LEAST_NEW = 8
"""Steps that have to be measured before."""

_lock = threading.Lock()


class ModelMemory:
    """The rates, costs, vocabularies and own pool that drafting keeps of a model between calls.

    The pool is the only place that holds tokens; it stays empty unless a call is told to learn.
    Costs outlive the process, in a file.
    """

    def __init__(self, model: Any) -> None:
        """Read the costs that an earlier process measured of the same model."""
        from lookahead_hf.drafting import kept_costs  # imports torch

        self.rates = KeptRates()
        self._file = kept_costs.file_of(model)
        self.costs = CostModel(kept=kept_costs.read(self._file))
        self.vocabularies: dict[str, Vocabulary] = {}
        self._num_kept, self._kept_at = 0, -math.inf
        self._pool: ngram_pool.NgramPool | None = None

    def keep_costs(self, at_once: bool = False) -> None:
        """Write the costs to the file, if there is something new and it was not done just now."""
        count, now = self.costs.num_observed, time.monotonic()
        is_due = at_once or now > self._kept_at + KEEP_EVERY
        if self._file is None or not is_due or abs(count - self._num_kept) < LEAST_NEW:
            return
        from lookahead_hf.drafting import kept_costs

        self._num_kept, self._kept_at = count, now
        kept_costs.write(self._file, self.costs.kept())

    def own_pool(self) -> ngram_pool.NgramPool:
        """Return the model's own pool, made when it is first asked for."""
        with _lock:
            self._pool = self._pool or ngram_pool.NgramPool(max_tokens=OWN_POOL_TOKENS)
            return self._pool


def memory_of(model: Any) -> ModelMemory:
    """Return the model's memory, made when it is first asked for."""
    return kept(model, ModelMemory, lambda: ModelMemory(model))


def placement(model: Any) -> str:
    """Return the device and the type of a model, which change what its steps cost."""
    return f"{model.device} {model.dtype}"

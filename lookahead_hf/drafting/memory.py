"""What drafting remembers of a model between calls."""

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
"""Seconds between two writes of the measured costs."""

LEAST_NEW = 8
"""New measurements that are worth a write."""

_lock = threading.Lock()


class ModelMemory:
    """The rates, costs, vocabularies and own pool of a model.

    Only the pool holds tokens, and it stays empty unless a call learns. A file keeps the costs for
    later processes.
    """

    def __init__(self, model: Any) -> None:
        """Read the costs that an earlier process measured."""
        from lookahead_hf.drafting import kept_costs  # imports torch
        from lookahead_hf.model.experts import experts_of

        self.rates = KeptRates()
        self._file = kept_costs.file_of(model)
        kept_curves = kept_costs.read(self._file)
        self.costs = CostModel(kept=kept_curves, experts=experts_of(model))
        self.vocabularies: dict[str, Vocabulary] = {}
        self._num_kept, self._kept_at = 0, -math.inf
        self._pool: ngram_pool.NgramPool | None = None

    def keep_costs(self, at_once: bool = False) -> None:
        """Write the costs if enough are new and the last write is long ago, or `at_once`."""
        count, now = self.costs.num_observed, time.monotonic()
        is_due = at_once or now > self._kept_at + KEEP_EVERY
        if self._file is None or not is_due or abs(count - self._num_kept) < LEAST_NEW:
            return
        from lookahead_hf.drafting import kept_costs

        self._num_kept, self._kept_at = count, now
        kept_costs.write(self._file, self.costs.kept())

    def own_pool(self) -> ngram_pool.NgramPool:
        with _lock:
            self._pool = self._pool or ngram_pool.NgramPool(max_tokens=OWN_POOL_TOKENS)
            return self._pool


def memory_of(model: Any) -> ModelMemory:
    return kept(model, ModelMemory, lambda: ModelMemory(model))


def placement(model: Any) -> str:
    """Return the device and dtype of a model, which change the cost of its steps."""
    return f"{model.device} {model.dtype}"

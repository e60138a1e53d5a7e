"""What drafting remembers of a model between calls."""

from __future__ import annotations

import threading
from typing import Any

from lookahead_hf import ngram_pool
from lookahead_hf.drafting.costs import CostModel
from lookahead_hf.drafting.rates import KeptRates
from lookahead_hf.model.state import kept

OWN_POOL_TOKENS = 1_000_000

_lock = threading.Lock()


class ModelMemory:
    """The rates, costs, vocabularies and own pool of a model.

    Only the pool holds tokens, and it stays empty unless a call learns.
    """

    def __init__(self) -> None:
        self.rates, self.costs = KeptRates(), CostModel()
        self.vocabularies: dict[str, Any] = {}  # of the source "grammar"
        self._pool: ngram_pool.NgramPool | None = None

    def own_pool(self) -> ngram_pool.NgramPool:
        with _lock:
            self._pool = self._pool or ngram_pool.NgramPool(max_tokens=OWN_POOL_TOKENS)
            return self._pool


def memory_of(model: Any) -> ModelMemory:
    return kept(model, ModelMemory, ModelMemory)


def placement(model: Any) -> str:
    """Return the device and dtype of a model, which change the cost of its steps."""
    return f"{model.device} {model.dtype}"

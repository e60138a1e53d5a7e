"""What drafting keeps of a model between calls."""

from __future__ import annotations

import threading
from typing import Any

from lookahead_hf import ngram_pool
from lookahead_hf.drafting.calibration import KeptRates
from lookahead_hf.drafting.cost_model import CostModel
from lookahead_hf.model_state import state_of

OWN_POOL_TOKENS = 1_000_000

_lock = threading.Lock()


class ModelMemory:
    """What drafting keeps of a model between calls: rates, costs, and its own pool.

    The pool is the only place that holds tokens; it stays empty unless a call is told to learn.
    """

    def __init__(self) -> None:
        self.rates = KeptRates()
        self.costs = CostModel()
        self._pool: ngram_pool.NgramPool | None = None

    def own_pool(self) -> ngram_pool.NgramPool:
        """The model's own pool, made when it is first asked for."""
        with _lock:
            self._pool = self._pool or ngram_pool.NgramPool(max_tokens=OWN_POOL_TOKENS)
            return self._pool


def memory_of(model: Any) -> ModelMemory:
    """The model's memory, made when it is first asked for."""
    state = state_of(model)
    with state.lock:
        state.drafting = state.drafting or ModelMemory()
        return state.drafting


def placement(model: Any) -> str:
    """The device and the type of a model, which change what its steps cost."""
    return f"{model.device} {model.dtype}"

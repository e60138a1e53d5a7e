"""The layers of a model that keep a recurrent state, in the steps of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from torch import nn

from lookahead_hf import compat
from lookahead_hf.model_state import state_of
from lookahead_hf.runner.recurrent.mixer import Compared, Mixer, Stash, TokenByToken
from lookahead_hf.runner.shared_change import SetOwn, own_attributes

_step = threading.local()


class RecurrentLayers:
    """The mixers of a model in one call, each with the state of every row."""

    def __init__(self, model: nn.Module, cache: Any, num_rows: int, by_token: bool = False) -> None:
        """Prepare for one call.

        Args:
            model: The target.
            cache: The cache that holds the states.
            num_rows: Rows of the batch.
            by_token: Whether every mixer gets the tokens of a block one by one, so that a token's
                bits do not depend on the draft.
        """
        stepwise = state_of(model).stepwise_mixers
        self._mixers: dict[int, Mixer] = {}
        for index, module in enumerate(compat.mixers(model)):
            kind: type[Mixer] = Compared if stepwise is None else Stash
            if by_token or index in (stepwise or ()):
                kind = TokenByToken
            self._mixers[id(module)] = kind(module, cache, num_rows)
        # Tokens behind the prompt, [rows]; None in `keep`, and after an exception there.
        self._kept: np.ndarray | None = np.zeros(num_rows, np.int64)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a block inside, on this thread, from the states of the call."""
        outer = getattr(_step, "mixers", None)
        _step.mixers = self._mixers
        try:
            yield
        finally:
            _step.mixers = outer

    def keep(self, counts: np.ndarray) -> None:
        """Keep the first tokens of the latest block in every row, [rows]; 0 for an ended row."""
        kept, self._kept = self._kept, None
        for mixer in self._mixers.values():
            mixer.keep(counts)
        self._kept = None if kept is None else kept + counts

    def are_at(self, num_kept: int) -> bool:
        """Whether every mixer has kept so many tokens behind the prompt in every row."""
        return self._kept is not None and bool((self._kept == num_kept).all())

    def settle(self) -> None:
        """Bring the state of every row to its last kept token."""
        for mixer in self._mixers.values():
            mixer.settle()

    @property
    def differences(self) -> list[float]:
        """How far each mixer's blocks are from single tokens, where mixers are compared."""
        return [m.difference for m in self._mixers.values() if isinstance(m, Compared)]


def laid_under(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model's mixers run our blocks as `RecurrentLayers` says.

    All other forwards, such as those of other threads meanwhile, are the model's own.
    """
    modules = compat.mixers(model)
    if not modules:
        return nullcontext()

    def replace(set_own: SetOwn) -> None:
        for module in modules:
            set_own(module, "forward", _in_steps(module))

    return own_attributes(model, "mixers", replace)


def _in_steps(module: Any) -> Callable[..., Any]:
    """A `forward` for a mixer that differs from its own within our steps only."""
    original, short = module.forward, compat.without_padding(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        mixers: dict[int, Mixer] = getattr(_step, "mixers", None) or {}
        mixer = mixers.get(id(module))
        return original(*args, **kwargs) if mixer is None else mixer.forward(short, *args, **kwargs)

    return forward

"""When the linear layers of a model are packed, and how the steps of one call use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeGuard

import torch
from torch import nn

from lookahead_hf.model_state import state_of
from lookahead_hf.runner.linear_calls import InputObserver, is_watched, laid, linear_is_torchs
from lookahead_hf.runner.packed_linear import PackedLinears

PACKED_AFTER = 12
"""Steps of a model after which "auto" packs its weights. Packing takes as long as about six steps,
and each packed step saves a third."""

LONG_CALL = 64
"""New tokens from which a call pays for packing itself, so that its first step packs."""

_IS_PATCHED = getattr(nn.Linear.forward, "__globals__", None) is not vars(torch.nn.modules.linear)


def _only_multiplies() -> bool:
    """Whether linear layers are torch's own and nobody watches all modules or functions.

    This is asked once a step.
    """
    return not is_watched() and linear_is_torchs()


def _may_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer with an ordinary weight on the CPU."""
    if type(module) is not nn.Linear or _IS_PATCHED:
        return False
    return type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"


def _dtype(model: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in model.parameters()), None)


class PackedSteps:
    """How the steps of one call use packed layers.

    Attributes:
        is_used: Whether the latest step used packed copies, or the next one can.
        is_typical: Whether the latest step did nothing but its forward. The step that packs does
            not tell what steps cost.
    """

    def __init__(
        self, model: nn.Module, wanted: str | bool = "auto", num_new_tokens: int = 0
    ) -> None:
        """Go on with what is kept of the model, unless its weights have changed.

        Args:
            model: The target.
            wanted: As `packed_weights` in `SpeculativeConfig`.
            num_new_tokens: Most tokens that the call may emit in a row.
        """
        self._model, self._wanted = model, wanted
        self._after = 0 if num_new_tokens >= LONG_CALL else PACKED_AFTER
        self.is_typical = True
        kept = self._kept()
        if kept is not None and not (kept.are_current() and kept.dtype in (None, _dtype(model))):
            state_of(model).packed = None  # to be packed after as many steps as the first time
            kept = None
        self.is_used = kept is not None and kept.are_ready()

    def _kept(self) -> PackedLinears | None:
        """Return what is kept of the model, None where the call does not want it."""
        if self._wanted is False:
            return None
        state = state_of(self._model)
        with state.lock:
            state.packed = state.packed or PackedLinears()
            return state.packed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside: with packed layers, or watched where it is time to pack them."""
        self.is_typical = True
        kept = self._kept()
        if kept is None or not _only_multiplies():
            self.is_used = False
            yield
            return
        kept.num_steps += 1
        if kept.are_ready():
            before = kept.thread.num_products
            with kept.laid_under():
                yield
            self.is_used = kept.thread.num_products > before
            return
        is_due = kept.num_steps > self._after or self._wanted is True
        if kept.stand_ins is None and is_due and kept.packing.acquire(blocking=False):
            try:
                layers = [each for each in self._model.modules() if _may_be_packed(each)]
                observer = InputObserver(layers)
                with laid(observer.calls, set()):
                    yield
                self.is_typical = False
                kept.pack(observer.blocks, self._wanted is True)
                kept.dtype = _dtype(self._model)
            finally:
                kept.packing.release()
            self.is_used = kept.are_ready()
        else:
            self.is_used = False
            yield

    def prefill(self) -> AbstractContextManager[None]:
        """Return a context for the prompt, with packed layers where they give plain's bits.

        They save a third of a multiplication by 64 tokens, and a quarter of one by 256.
        """
        kept = self._kept()
        if kept is not None and kept.same_bits and kept.are_ready() and _only_multiplies():
            return kept.laid_under()
        return nullcontext()

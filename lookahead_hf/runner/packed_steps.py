"""How the steps of a call on a CPU run the model: what stands in for its layers, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TypeGuard

import torch
from torch import nn

from lookahead_hf.model_state import state_of
from lookahead_hf.runner import torch_compile
from lookahead_hf.runner.below_autograd import BelowAutograd
from lookahead_hf.runner.norm_calls import NormCalls
from lookahead_hf.runner.packed_linear import PackedLinears
from lookahead_hf.runner.stand_ins import InputObserver, is_watched, laid, linear_is_torchs

PACKED_AFTER = 12
"""Steps of a model after which "auto" packs its weights. Packing takes as long as about six steps,
and each packed step saves a third."""

LONG_CALL = 64
"""New tokens from which a call pays for packing itself, so that its first step packs."""


class PackedSteps:
    """How the steps of one call run the model: packed layers, compiled norms, no autograd.

    Where somebody watches, and where the model is compiled, its own code runs alone.

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
        self._model, self._is_compiled = model, torch_compile.is_compiled(model)
        self._wanted = False if self._is_compiled else wanted
        self._after = 0 if num_new_tokens >= LONG_CALL else PACKED_AFTER
        self.is_typical = True
        kept = self._kept()
        if kept is not None and not kept.are_current(_dtype(model)):
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

    @cached_property
    def _parts(self) -> tuple[NormCalls, BelowAutograd]:
        """What else is left out of steps; a call that only reads a prompt does not look for it."""
        modules = [] if self._is_compiled else list(self._model.modules())
        return NormCalls(modules), BelowAutograd(modules)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside: with packed layers, or observed where it is time to pack them."""
        self.is_typical, self.is_used = True, False
        if is_watched():
            yield
            return
        norms, below_autograd = self._parts
        with self._linears(), norms.step(), below_autograd.step():
            yield

    @contextmanager
    def _linears(self) -> Iterator[None]:
        kept = self._kept() if linear_is_torchs() else None
        if kept is None:
            yield
            return
        kept.num_steps += 1
        if kept.are_ready():
            before = kept.thread.num_products
            with kept.laid_under():
                yield
            self.is_used = kept.thread.num_products > before
        elif self._is_due(kept) and kept.packing.acquire(blocking=False):
            try:
                observer = InputObserver(filter(_may_be_packed, self._model.modules()))
                with laid(observer.calls, set()):
                    yield
                self.is_typical = False
                kept.pack(observer.blocks, _dtype(self._model), self._wanted is True)
            finally:
                kept.packing.release()
            self.is_used = kept.are_ready()
        else:
            yield

    def _is_due(self, kept: PackedLinears) -> bool:
        """Whether it is time to pack the model's layers, which was not tried so far."""
        return kept.dtype is None and (kept.num_steps > self._after or self._wanted is True)

    def prefill(self) -> AbstractContextManager[None]:
        """Return a context for the prompt, with packed layers where they give plain's bits.

        They save a third of a multiplication by 64 tokens, and a quarter of one by 256.
        """
        kept = self._kept()
        if kept is None or not (kept.same_bits and kept.are_ready()):
            return nullcontext()
        return nullcontext() if is_watched() or not linear_is_torchs() else kept.laid_under()


def _may_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer with an ordinary weight on the CPU."""
    if type(module) is not nn.Linear:
        return False
    return type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"


def _dtype(model: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in model.parameters()), None)

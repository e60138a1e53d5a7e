"""How the steps of one call run the model's layers on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from lookahead_hf.call import execution
from lookahead_hf.engines.cpu import team
from lookahead_hf.engines.cpu.kernels import program
from lookahead_hf.engines.cpu.layers.compiled import CompiledLayers
from lookahead_hf.engines.cpu.layers.step import Broken
from lookahead_hf.model import compat
from lookahead_hf.model.state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions
from lookahead_hf.runner.host import Runner, StepOptions

_logger = logging.getLogger(__name__)

LOADING_SECONDS = 0.1
"""Time for which the beginning of a call loads kernels that another process has compiled."""


class CompiledSteps:
    """The steps of one call, whose layers run by the kernels or by their own code.

    `counts` is empty if a call does not use the kernels.
    """

    most_tokens = program.MOST_TOKENS

    def __init__(self, model: Any, asked: bool | str = True, refusal: str | None = None) -> None:
        """Describe the model's layers, or those that have changed since the last call.

        Args:
            model: The target.
            asked: As `compiled_layers` of the configuration. For "everywhere" the call waits until
                the kernels are compiled. Without it they read prompts where torch is slow.
            refusal: Why the call does not use the kernels, None if it may.
        """
        self._given = model, asked, refusal
        refusal = refusal or (None if asked else execution.NOT_ASKED_FOR)
        refusal = refusal or _refusal(model, waits=asked == "everywhere")
        self._layers = None if refusal else _kept(model)
        self.reasons = {refusal} if refusal else set[str]()
        self.counts: dict[str, int] = {}
        if self._layers is not None:
            self.reasons |= self._layers.refused
        self.is_used = self._layers is not None and bool(self._layers.layers)
        self._must_read = self.is_used and asked == "everywhere"
        is_faster = self.is_used and compat.multiplies_slowly(model.dtype)
        self.reads_prompts = self._must_read or is_faster

    def renewed(self) -> CompiledSteps:
        """Return the steps of the same call for weights that may have changed."""
        return CompiledSteps(*self._given)

    def leave_prompt(self) -> None:
        """Let the model's own code read the prompt; the statistics say so if kernels should."""
        if self._must_read:
            self.reasons.add(execution.PROMPT)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run a forward, with the kernels where nothing forbids it; `forward` may run twice."""
        layers, self.is_used = self._layers, False
        if layers is None or not layers.layers:
            return forward()
        reason = layers.refusal()
        if reason is None:
            try:
                outputs, step = layers.run(forward)
            except Broken:
                _logger.info("a forward runs again without the kernels", exc_info=True)
                self._layers, reason = None, execution.OUT_OF_ORDER
            else:
                self._note(step.num_computed, step.num_own + layers.num_refused)
                self.reasons |= step.reasons
                return outputs
        self._note(0, len(layers.layers) + layers.num_refused)
        self.reasons.add(reason)
        return forward()

    def _note(self, by_kernels: int, by_own_code: int) -> None:
        """Note how many layers of the latest step ran in which way."""
        self.is_used = by_kernels > 0
        self.counts = {execution.COMPILED: by_kernels, execution.MODEL: by_own_code}


def runner(options: StepOptions) -> Runner:
    """Return the runner of a call on a CPU."""
    refusal = None if options.is_alone else execution.PROCESSES  # which must agree
    steps = CompiledSteps(options.model, options.compiled_layers, refusal)
    is_flat = options.takes_flat(steps.reads_prompts)
    return Runner(options.model, options.num_rows, options.shape, steps, is_flat)


def groups_of(model: Any) -> list[Functions]:
    """Return the compiled functions that calls on a model need, those first that pay first.

    Kernels, which take a third of the time to compile, make steps without drafts faster, too.
    """
    dtypes = (each.dtype for each in model.parameters())  # a few layers may have another
    return [*program.groups_of([model.dtype, *dtypes]), compilation.drafting]


def _refusal(model: Any, waits: bool) -> str | None:
    """Return why a call cannot use the kernels, None if it can; have them compiled."""
    if not team.has_torchs_threads():
        return execution.NO_OPENMP
    if state_of(model).get(CompiledLayers) is not None and program.is_ready(model.dtype):
        return None
    groups = groups_of(model)
    compilation.wait(groups) if waits else compilation.request(groups)
    kernels = groups[:-1]
    if all(each.ready(LOADING_SECONDS) for each in kernels):
        return None
    is_failed = not all(each.is_available() for each in kernels)
    return execution.NO_COMPILER if is_failed else execution.COMPILING


def _kept(model: nn.Module) -> CompiledLayers:
    """Return the model's compiled layers, described again if the model has changed."""
    state = state_of(model)
    with state.lock:
        kept = state.get(CompiledLayers)
        if kept is None or not kept.is_current():
            kept = state.put(CompiledLayers(model))
        return kept

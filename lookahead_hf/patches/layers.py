"""Layers that compiled kernels compute in our steps on a CPU.

For the length of a step, a call of ours lies under each decoder layer whose code the kernels know,
and under each other linear layer. Where the model's own forward does nothing between its layers,
the layers are noted as they are called, and the last one computes all of them in one call. A module
whose code is not known, or that anybody has hooked or changed, runs its own code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn

from lookahead_hf import compat
from lookahead_hf.call import execution
from lookahead_hf.kernels.cpu import team
from lookahead_hf.model.compiled import is_compiled
from lookahead_hf.model_state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.patches import layer_descriptions
from lookahead_hf.patches.calls import is_stock, is_watched, laid
from lookahead_hf.patches.layer_code import is_known
from lookahead_hf.patches.layer_programs import Program, Unknown
from lookahead_hf.patches.layer_room import Room, Unit
from lookahead_hf.patches.layer_step import Broken, LayerStep
from lookahead_hf.patches.layer_trial import Trial, width_of

_logger = logging.getLogger(__name__)

LEAST_WEIGHT = 1 << 16
"""Fewest numbers of a lone linear layer's weight. A smaller one takes less time than the call."""


class CompiledSteps:
    """How the steps of one call on a CPU run the model's layers.

    Attributes:
        is_used: Whether kernels computed layers in the latest step, or will in the first one.
        counts: Layers by how the latest step ran them, "compiled" or "model"; of a model that
            nobody looked at, none.
        reasons: Why layers ran their own code so far, of `execution`.
        was_timed: Whether the latest step ran several times, to find out which way is faster.
    """

    was_timed = False

    def __init__(self, model: nn.Module, refusal: str | None = None) -> None:
        """Find out what the kernels serve, and describe the layers where they have changed.

        Args:
            model: The target.
            refusal: Why the call does not want the kernels, None if it does.
        """
        refusal = refusal or _refusal(model)
        self._layers = None if refusal else _kept(model)
        self.reasons = {refusal} if refusal else set[str]()
        self.counts: dict[str, int] = {}
        if self._layers is not None:
            self.reasons |= self._layers.refused
            self._lost = self._layers.trial.lost  # in one call a width goes one way
        self.is_used = self._layers is not None and bool(self._layers.units)

    def run(self, forward: Callable[[], Any], num_tokens: int, flat: Any = None) -> Any:
        """Run a forward, in which the kernels compute layers where nothing speaks against it.

        Args:
            forward: Runs it, and can do so again.
            num_tokens: Its tokens.
            flat: How the tokens of a flat block belong to the rows of the cache, else None.
        """
        layers, self.is_used = self._layers, False
        if layers is None or not layers.units:
            return forward()
        width = width_of(num_tokens)
        reason = execution.SLOWER if width in self._lost else _refusal_now(layers)
        if reason is None:
            try:
                self.was_timed = layers.is_due(width)
                if self.was_timed:
                    layers.trial.time(width, forward, lambda: layers.run(forward, flat))
                outputs, step = layers.run(forward, flat)
            except Broken:
                _logger.info("a forward runs again without the kernels", exc_info=True)
                self._layers, reason = None, execution.OUT_OF_ORDER
            else:
                self._note(step.num_computed, step.num_own + layers.num_refused)
                self.reasons |= step.reasons
                return outputs
        self._note(0, len(layers.units) + layers.num_refused)
        self.reasons.add(reason)
        return forward()

    def _note(self, by_kernels: int, by_own_code: int) -> None:
        """Note how many layers the latest step ran in which way."""
        self.is_used = by_kernels > 0
        self.counts = {execution.COMPILED: by_kernels, execution.MODEL: by_own_code}


def _refusal(model: nn.Module) -> str | None:
    """Return why a call cannot use the kernels, None if it can; start to compile them."""
    kernels = compilation.of_kernels
    if is_compiled(model):
        return execution.BY_TORCH
    if not team.has_torchs_threads():
        return execution.NO_OPENMP
    if kernels.compiled() or (compilation.ready() and kernels.ready()):  # behind what drafts need
        return None
    is_failed = not (compilation.available() and kernels.available())
    return execution.NO_COMPILER if is_failed else execution.COMPILING


def _refusal_now(layers: CompiledLayers) -> str | None:
    """Return why a step cannot use the kernels, None if it can."""
    if is_watched():
        return execution.WATCHED
    return None if is_stock() and not layers.is_replaced() else execution.FUNCTIONS


def _kept(model: nn.Module) -> CompiledLayers:
    """Return what is kept of the model, made anew where the model has changed."""
    state = state_of(model)
    with state.lock:
        kept = state.get(CompiledLayers)
        if kept is None or not kept.is_current():
            kept = state.put(CompiledLayers(model))
        return kept


class CompiledLayers:
    """The layers of one model that kernels compute, kept between calls.

    Attributes:
        units: Them, decoder layers first.
        refused: Why others run their own code, each reason once.
        num_refused: How many others do.
        trial: At which widths the model's own code is faster.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units: list[Unit] = []
        self.refused, self.num_refused = set[str](), 0
        self._on_thread, self._users = threading.local(), set[object]()
        self._decoder, layers = _decoder(model)
        inside: set[nn.Module] = set()
        if len(set(layers)) < len(layers):
            self._refuse("a layer is there twice", len(layers))
            layers = []
        elif not layers:
            self._refuse(f"{type(model).__name__} has decoder layers of another build", 0)
        for layer in layers:
            if self._add(layer_descriptions.of_layer, layer):
                inside.update(layer.modules())
        self._num_layers = len(self.units)
        has_all = 0 < len(layers) == len(self.units)
        for module in model.modules():
            is_linear = isinstance(module, nn.Linear) and module not in inside
            if is_linear and (has_all or _is_large(module)):
                self._add(layer_descriptions.of_linear, module)
        self._calls: list[tuple[nn.Module, Any]] = [
            (unit.module, _Call(self._on_thread, unit)) for unit in self.units
        ]
        self.trial = Trial({unit.program.dtype for unit in self.units})
        self._shared = {
            key: each for unit in self.units for key, each in unit.program.shared.items()
        }

    def _add(self, describe: Callable[[Any], Program], module: nn.Module) -> bool:
        """Add a layer if there are kernels for it; return whether there are."""
        before = self.units[-1] if self.units else None
        first = 0 if before is None else before.first + len(before.program.ops)
        try:
            self.units.append(Unit(module, describe(module), first))
        except Unknown as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(f"{type(module).__name__} is not built as its code says: {error}")
        else:
            return True
        return False

    def _refuse(self, why: str, count: int = 1) -> None:
        """Note that layers run their own code."""
        self.refused.add(f"{execution.UNKNOWN}: {why}")
        self.num_refused += count

    def release(self) -> None:
        """Do nothing more: a call in progress keeps the layers until it ends."""

    def is_current(self) -> bool:
        """Return whether all layers are what they were when they were described."""
        return not self.is_replaced() and not any(each.program.is_changed() for each in self.units)

    def is_replaced(self) -> bool:
        """Return whether anybody replaced a function that layers call."""
        return not all(
            (mapping.get(name) if isinstance(mapping, dict) else getattr(mapping, name, None))
            is known
            for (_, name), (mapping, known) in self._shared.items()
        )

    @property
    def last(self) -> Unit:
        """The last decoder layer."""
        return self.units[self._num_layers - 1]

    def is_whole(self) -> bool:
        """Return whether the model's forward does nothing between its layers, all of them ours."""
        decoder, layers = self._decoder(), self.units[: self._num_layers]
        if decoder is None or not layers or not all(unit.is_trusted for unit in layers):
            return False
        if not is_known("Model", type(decoder).forward):
            return False
        called = list(decoder.layers)[: decoder.config.num_hidden_layers]
        return list(map(id, called)) == [id(unit.module) for unit in layers]

    @contextmanager
    def step(self, flat: Any = None) -> Iterator[LayerStep]:
        """Let this thread's calls of the layers go through the kernels; yield what was done."""
        change = laid(self._calls, self._users)
        with change, change:  # an interrupt may break off one exit
            try:
                step, outer = self._begin(flat), self._current
            except Exception as error:
                raise Broken from error
            self._on_thread.step = step
            try:
                yield step
                step.finish()
            finally:
                self._on_thread.step = outer

    def _begin(self, flat: Any) -> LayerStep:
        """Return a step in which the layers run that now call us."""
        others = sum(vars(of).get(compat.CALL) is not call for of, call in self._calls)
        whole_until = self.last if not others and self.is_whole() else None
        step = LayerStep(self._room(), whole_until, flat)
        if others:  # torch's, or those of another description of the model
            step.num_own += others
            step.reasons.add(execution.OTHER_CALL)
        return step

    def run(self, forward: Callable[[], Any], flat: Any = None) -> tuple[Any, LayerStep]:
        """Run a forward with the kernels; return what it returns, and what was done."""
        with self.step(flat) as step:
            return forward(), step

    def is_due(self, width: int) -> bool:
        """Return whether a step of this width is to be timed in both ways."""
        return self.trial.is_due(width) and all(unit.is_trusted for unit in self.units)

    @property
    def _current(self) -> LayerStep | None:
        """The step in progress on this thread."""
        return getattr(self._on_thread, "step", None)

    def _room(self) -> Room:
        known: Room | None = getattr(self._on_thread, "room", None)
        if known is None:
            known = self._on_thread.room = Room(self.units)
        return known


class _Call:
    """What is called in place of a module in a step."""

    __slots__ = ("_on_thread", "_unit")

    def __init__(self, on_thread: threading.local, unit: Unit) -> None:
        self._on_thread, self._unit = on_thread, unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step: LayerStep | None = getattr(self._on_thread, "step", None)
        if step is not None:
            try:
                out = step.call(self._unit, args, kwargs)
            except Exception as error:
                raise Broken from error
            if out is not None:
                return out
        return compat.own_call(self._unit.module, *args, **kwargs)


def _decoder(model: nn.Module) -> tuple[Callable[[], Any], list[nn.Module]]:
    """Return a weak reference to the module that calls the decoder layers, and the layers."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) and hasattr(layers[0], "self_attn"):
            return ref(module), list(layers)
    return lambda: None, []


def _is_large(module: nn.Module) -> bool:
    weight = compat.parameters_of(module).get("weight")
    return type(weight) is nn.Parameter and weight.numel() >= LEAST_WEIGHT

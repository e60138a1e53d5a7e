"""Layers that compiled kernels compute in our steps on a CPU.

For the length of a step, a call of ours lies under each decoder layer whose code the kernels know,
and under each other linear layer. Where the model's own forward does nothing between its layers,
the layers are noted as they are called, and the last one computes all of them in one call. A module
whose code is not known, or that anybody has hooked or changed, runs its own code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn

from lookahead_hf import compat
from lookahead_hf.kernels.cpu import team
from lookahead_hf.model.compiled import is_compiled
from lookahead_hf.model_state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.patches import layer_descriptions
from lookahead_hf.patches.calls import is_stock, is_watched, laid
from lookahead_hf.patches.layer_code import is_known
from lookahead_hf.patches.layer_programs import Program, Unknown
from lookahead_hf.patches.layer_room import Room, Unit
from lookahead_hf.patches.layer_step import LayerStep

LEAST_WEIGHT = 1 << 16
"""Fewest numbers of a lone linear layer's weight. A smaller one takes less time than the call."""


class CompiledSteps:
    """How the steps of one call on a CPU run the model's layers.

    Attributes:
        is_used: Whether kernels computed layers in the latest step, or will in the first one.
        reasons: Why layers ran their own code so far.
    """

    def __init__(self, model: nn.Module, wanted: bool = True) -> None:
        """Find out what the kernels serve, and describe the layers where they have changed.

        Args:
            model: The target.
            wanted: Whether the call wants the kernels.
        """
        self.reasons: set[str] = set()
        self._layers: CompiledLayers | None = None
        if not wanted:
            self.reasons.add("compiled layers were not asked for")
        elif is_compiled(model):
            self.reasons.add("the model is compiled")
        elif not team.has_torchs_threads():
            self.reasons.add("no OpenMP library has torch's threads for the kernels")
        elif not _are_compiled():
            self.reasons.add("the kernels are being compiled")
        else:
            self._layers = _kept(model)
            self.reasons |= self._layers.refused
        self.is_used = self._layers is not None and bool(self._layers.units)

    @contextmanager
    def step(self, flat: Any = None) -> Iterator[None]:
        """Let the kernels compute layers inside, where nothing speaks against it.

        Args:
            flat: How the tokens of a flat block belong to the rows of the cache, else None.
        """
        self.is_used, layers = False, self._layers
        if layers is None or not layers.units:
            yield
        elif is_watched() or not is_stock() or layers.is_replaced():
            self.reasons.add("calls of torch are being watched, or functions were replaced")
            yield
        else:
            with layers.step(flat) as step:
                yield
            self.is_used = step.num_computed > 0
            self.reasons |= step.reasons


def _are_compiled() -> bool:
    """Return whether the kernels are compiled; if not, start to, behind what drafting needs."""
    kernels = compilation.of_kernels
    return kernels.compiled() or (compilation.ready() and kernels.ready())


def _kept(model: nn.Module) -> CompiledLayers:
    """Return what is kept of the model, made anew where the model has changed."""
    state = state_of(model)
    with state.lock:
        kept = state.compiled
        if kept is None or not kept.is_current():
            kept = state.compiled = CompiledLayers(model)
        return kept


class CompiledLayers:
    """The layers of one model that kernels compute, kept between calls.

    Attributes:
        units: Them, decoder layers first.
        refused: Why others run their own code, each reason once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units: list[Unit] = []
        self.refused: set[str] = set()
        self._on_thread, self._users = threading.local(), set[object]()
        self._decoder, layers = _decoder(model)
        inside: set[nn.Module] = set()
        if len(set(layers)) < len(layers):
            self.refused.add("a layer is there twice")
            layers = []
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
            self.refused.add(str(error))
        except (AttributeError, TypeError, ValueError) as error:
            self.refused.add(f"{type(module).__name__} is not built as its code says: {error}")
        else:
            return True
        return False

    def is_current(self) -> bool:
        """Return whether all layers are what they were when they were described."""
        return not self.is_replaced() and not any(each.program.is_changed() for each in self.units)

    def is_replaced(self) -> bool:
        """Return whether anybody replaced a function that layers call."""
        return not all(
            (mapping.get(name) if isinstance(mapping, dict) else getattr(mapping, name)) is known
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
        called = list(decoder.layers)[: decoder.config.num_hidden_layers]
        if len(called) != len(layers):
            return False
        are_ours = all(unit.module is each for unit, each in zip(layers, called, strict=True))
        return are_ours and is_known("Model", type(decoder).forward)

    @contextmanager
    def step(self, flat: Any = None) -> Iterator[LayerStep]:
        """Let this thread's calls of the layers go through the kernels; yield what was done."""
        whole_until = self.last if self.is_whole() else None
        step, outer = LayerStep(self._room(), whole_until, flat), self._current
        change = laid(self._calls, self._users)
        with change, change:  # an interrupt may break off one exit
            self._on_thread.step = step
            try:
                yield step
                step.finish()
            finally:
                self._on_thread.step = outer

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
            out = step.call(self._unit, args, kwargs)
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

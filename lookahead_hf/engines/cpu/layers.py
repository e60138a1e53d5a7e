"""Layers that compiled kernels compute in our steps on a CPU.

During a step, each decoder layer whose class the kernels know, and each other large linear layer,
is called through us. Where the model's own forward does nothing between its layers, they are noted
as they are called, and the last one computes all of them in one call. A module of another class, or
that somebody has hooked or changed, runs its own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import nn

from lookahead_hf.call import execution
from lookahead_hf.engines.cpu import team
from lookahead_hf.engines.cpu.descriptions import (
    MODELS,
    describe_layer,
    describe_linear,
    family_of,
    is_original,
)
from lookahead_hf.engines.cpu.kernels import program
from lookahead_hf.engines.cpu.programs import Program, Unknown
from lookahead_hf.engines.cpu.step import Broken, LayerStep
from lookahead_hf.engines.cpu.workspace import CompiledLayer, Workspace
from lookahead_hf.model import compat
from lookahead_hf.model.facts import facts_of
from lookahead_hf.model.state import state_of
from lookahead_hf.ngram_pool import compilation
from lookahead_hf.ngram_pool.compilation import Functions
from lookahead_hf.runner import watch
from lookahead_hf.runner.forward import ForwardContext, current, shared_change
from lookahead_hf.runner.host import Runner, StepOptions
from lookahead_hf.runner.watch import Watch

LEAST_WEIGHT = 1 << 16
"""Fewest numbers of a lone linear layer's weight. A smaller one takes less time than the call."""


class CompiledLayers:
    """The layers of one model that kernels compute, kept between calls.

    Attributes:
        layers: The layers, decoder layers first.
        refused: Why other layers run their own code.
        num_refused: Number of these layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[CompiledLayer] = []
        self.refused, self.num_refused = set[str](), 0
        self._unknown: list[tuple[Callable[[Any], Program], nn.Module]] = []
        self._users, self._free = set[object](), list[Workspace]()
        self._decoder, layers = _decoder(model)
        kind: Any = type(self._decoder())
        # The decoder's forward, if it is one that calls nothing between its layers.
        is_known = family_of(kind, MODELS) and is_original(kind.forward)
        self._forward = kind.forward if is_known else None
        inside: set[nn.Module] = set()
        if facts_of(model).repeats_layers:
            self._refuse("several layers share a layer of the cache", len(layers))
            layers = []
        elif not layers:
            self._refuse(f"{type(model).__name__} has decoder layers of another build", 0)
        for layer in layers:
            if self._add(describe_layer, layer):
                inside.update(layer.modules())
        self._num_layers = len(self.layers)
        has_all = 0 < len(layers) == len(self.layers)
        for module in model.modules():
            is_linear = isinstance(module, nn.Linear) and module not in inside
            if is_linear and (has_all or _is_large(module)):
                self._add(describe_linear, module)
        self._around = [(ref(each), _parts(each)) for each in model.modules() if each not in inside]
        calls = [(layer.module, _Call(self.layers, layer)) for layer in self.layers]
        self._calls = [(vars(module), call) for module, call in calls]
        self._watch = Watch.joined([each.program.watch for each in self.layers])

    def _add(self, describe: Callable[[Any], Program], module: nn.Module) -> bool:
        before = self.layers[-1] if self.layers else None
        first = 0 if before is None else before.first + len(before.program.ops)
        try:
            self.layers.append(CompiledLayer(module, describe(module), first))
            return True
        except Unknown as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(f"{type(module).__name__} is not built as its class says: {error}")
        self._unknown.append((describe, module))
        return False

    def _refuse(self, why: str, count: int = 1) -> None:
        self.refused.add(f"{execution.UNKNOWN}: {why}")
        self.num_refused += count

    def release(self) -> None:
        """Do nothing more: a call in progress keeps the layers until it ends."""

    def is_current(self) -> bool:
        """Return whether all layers are as they were described, or still cannot be."""
        is_same = self._watch.is_current() and self._is_same_build()
        return is_same and not any(map(_is_known, self._unknown))

    def _is_same_build(self) -> bool:
        return all(_parts(module()) == parts for module, parts in self._around)

    def refusal(self) -> str | None:
        """Return why a step cannot use the kernels now, None if it can."""
        if reason := watch.watcher():
            return reason
        if not self._is_same_build():
            return execution.CHANGED
        is_stock = watch.has_stock_functions() and watch.are_current(self._watch.functions)
        return None if is_stock else execution.FUNCTIONS

    def run(self, forward: Callable[[], Any]) -> tuple[Any, LayerStep]:
        """Run a forward with the kernels; return outputs and step, or raise Broken."""
        context = current()
        assert context is not None
        with shared_change(self._users, self._install, self._remove):
            try:
                step = self._begin(context)
            except Exception as error:
                raise Broken from error
            context.layers = step
            try:
                outputs = forward()
                step.finish()
            finally:
                context.layers = None
                self._free.append(step.workspace)
        return outputs, step

    def _install(self) -> None:
        """Have our calls made in place of the layers; one that `torch.compile` has given stays."""
        for own, call in self._calls:
            own.setdefault(compat.CALL, call)

    def _remove(self) -> None:
        for own in [own for own, call in self._calls if own.get(compat.CALL) is call]:
            del own[compat.CALL]

    def _begin(self, context: ForwardContext) -> LayerStep:
        others = sum(own.get(compat.CALL) is not call for own, call in self._calls)
        last = None if others or not self._is_whole() else self.layers[self._num_layers - 1]
        try:
            workspace = self._free.pop()
        except IndexError:  # other threads work in all of them
            workspace = Workspace(self.layers)
        step = LayerStep(workspace, last, self._watch, context)
        if others:  # torch's, or those of another description of the model
            step.num_own += others
            step.reasons.add(execution.OTHER_CALL)
        return step

    def _is_whole(self) -> bool:
        """Return whether the model's forward does nothing between its layers, all of them ours."""
        decoder, layers = self._decoder(), self.layers[: self._num_layers]
        if decoder is None or not layers or not all(layer.is_trusted for layer in layers):
            return False
        if type(decoder).forward is not self._forward or "forward" in vars(decoder):
            return False
        return self._num_layers == len(decoder.layers) <= decoder.config.num_hidden_layers


class _Call:
    """Takes the place of a layer's call; outside of our steps the layer runs itself."""

    __slots__ = ("_layer", "_layers")

    def __init__(self, layers: list[CompiledLayer], layer: CompiledLayer) -> None:
        self._layers, self._layer = layers, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = current()
        step = None if context is None else context.layers
        if step is not None and step.workspace.layers is self._layers:  # no other model's
            try:
                out = step.call(self._layer, args, kwargs)
            except Exception as error:
                raise Broken from error
            if out is not None:
                return out
        return compat.own_call(self._layer.module, *args, **kwargs)


def _decoder(model: nn.Module) -> tuple[Callable[[], Any], list[nn.Module]]:
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) and hasattr(layers[0], "self_attn"):
            return ref(module), list(layers)
    return lambda: None, []


def _parts(module: nn.Module | None) -> list[int]:
    """Return the ids of a module's own modules; the layers keep those that count alive."""
    return [] if module is None else [*map(id, compat.children_of(module).values())]


def _is_known(asked: tuple[Callable[[Any], Program], nn.Module]) -> bool:
    """Return whether there are kernels for a module now, such as after an adapter was merged."""
    describe, module = asked
    with suppress(Exception):
        describe(module)
        return True
    return False


def _is_large(module: nn.Module) -> bool:
    weight = compat.parameters_of(module).get("weight")
    return type(weight) is nn.Parameter and weight.numel() >= LEAST_WEIGHT


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

        `asked` is `compiled_layers` of the configuration: for "everywhere" the call waits until the
        kernels are compiled; without it they read prompts where they are faster. `refusal` says why
        the call does not use the kernels, None if it may.
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
        self._dtype = model.dtype if self.is_used else None

    def renewed(self) -> CompiledSteps:
        """Return the steps of the same call for weights that may have changed."""
        return CompiledSteps(*self._given)

    def reads_prompts(self, longest: int = 1) -> bool:
        """Return whether kernels read prompts, the longest of which has so many tokens."""
        return self._must_read or (self._dtype is not None and reads_faster(self._dtype, longest))

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
        self.is_used = by_kernels > 0
        self.counts = {execution.COMPILED: by_kernels, execution.MODEL: by_own_code}


LONGEST_BY_TILES = 8192
"""Most tokens of a prompt that tiles read faster than oneDNN: scores of more leave caches."""


def reads_faster(dtype: torch.dtype, num_tokens: int) -> bool:
    """Return whether kernels read a prompt of so many tokens faster than torch."""
    is_by_tiles = num_tokens <= LONGEST_BY_TILES and program.tiles_of(dtype) != ""
    return is_by_tiles or compat.multiplies_slowly(dtype)


def runner(options: StepOptions) -> Runner:
    """Return the runner of a call on a CPU."""
    refusal = None if options.is_alone else execution.PROCESSES  # which must agree
    steps = CompiledSteps(options.model, options.compiled_layers, refusal)
    is_packed = options.takes_packed(steps.reads_prompts())
    return Runner(options.model, options.num_rows, options.shape, steps, is_packed)


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
    state = state_of(model)
    with state.lock:
        kept = state.get(CompiledLayers)
        if kept is None or not kept.is_current():
            kept = state.put(CompiledLayers(model))
        return kept

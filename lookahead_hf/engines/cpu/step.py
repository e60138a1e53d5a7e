"""One forward in which compiled kernels compute layers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from lookahead_hf.cache.slots import SlotCache, SlotLayer
from lookahead_hf.call import execution
from lookahead_hf.engines.cpu.kernels.fields import SIDE_BY_SIDE
from lookahead_hf.engines.cpu.kernels.program import MOST_TOKENS, Plan, segment_of, tile_floats
from lookahead_hf.engines.cpu.workspace import Arguments, CompiledLayer, Workspace, plan_for
from lookahead_hf.model import compat
from lookahead_hf.runner import attention
from lookahead_hf.runner.forward import ForwardContext
from lookahead_hf.runner.watch import Watch

TOLERANCES = {
    torch.bfloat16: (0.05, 2.0**-7),
    torch.float16: (0.02, 2.0**-10),
    torch.float32: (1e-3, 1e-5),
}
"""Largest error of a layer in its first step, relative to what it adds and to its whole result."""

SEGMENT = 8  # Most tokens of a segment that vectors take, rounded up

_READ = {
    "attention_mask",
    *compat.CACHE_NAMES,
    "cache_position",
    "position_embeddings",
    "position_ids",
    "use_cache",
}
"""Arguments of a layer that the kernels understand."""

_NOTHING: Arguments = (0, 0, 0, 0, 0, 0, 0, 0, 0)


class Broken(Exception):
    """The forward has to run again, without the kernels."""


class LayerStep:
    """The forward in progress on one thread.

    Attributes:
        workspace: The memory that it works in.
        num_computed: Layers that kernels computed.
        num_own: Layers that ran their own code, although kernels know it.
        reasons: Why layers ran their own code.
    """

    def __init__(
        self,
        workspace: Workspace,
        last: CompiledLayer | None,
        watch: Watch,
        context: ForwardContext,
    ) -> None:
        """Begin; `last` is the last layer if the model does nothing between its layers.

        `watch` is that of all layers together.
        """
        self.workspace, self._last, self._watch = workspace, last, watch
        self._context = context
        self._pending: list[CompiledLayer] = []
        self._arguments: list[Arguments] = []
        self._stream: Any = None  # the numbers that noted layers work on in place
        self._next = self._pitch = self._span = 0
        self._is_trial = False
        self._held: list[Any] = []
        self._plans: dict[tuple[int, int, int], Plan | None] = {}
        self._known: tuple[Any, ...] = ()
        self.num_computed, self.num_own, self.reasons = 0, 0, set[str]()

    def call(
        self, layer: CompiledLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Compute a layer, or note it for the last one to compute; None if it runs its own code.

        Broken if layers were noted, and this one does not follow them.
        """
        if self._is_trial:
            return None
        x: Any = args[0] if len(args) == 1 else None
        if not self._pending:
            reason = _refusal(layer, x)
            if reason is None and layer.program.layer_index is None:
                return self._linear(layer, x)
            if self._last is not None and self._watch.refusal():
                self._last = None  # each layer is looked at by itself
        elif x is self._stream and layer.first == self._next:
            reason = None  # what was right for the first layer is right for those that follow
        else:
            raise Broken
        given = None if reason else self._arguments_of(layer, x, kwargs)
        if given is None:
            self.reasons.add(reason or execution.OTHER_ARGUMENTS)
            self.num_own += 1
            self._compute()
            return None
        if layer.is_trusted is None:
            return self._try(layer, args, kwargs, given)
        if not self._pending:
            self._stream = x.clone()
        self._pending.append(layer)
        self._next = layer.first + len(layer.program.ops)
        self._arguments.append((self._stream.data_ptr(), *given[1:]))
        if self._last is None or layer is self._last:
            self._compute()
        return self._stream

    def finish(self) -> None:
        """End the forward; Broken if it went on without the last layer."""
        if self._pending:
            raise Broken

    def _compute(self) -> None:
        if self._pending:
            self._run(self._pending, self._arguments, self._stream)
            self.num_computed += len(self._pending)
            self._pending, self._arguments = [], []

    def _run(self, layers: list[CompiledLayer], given: list[Arguments], x: torch.Tensor) -> None:
        workspace = self.workspace
        attending = SEGMENT * (self._pitch + 2 * workspace.head_dim) + 128
        if self._span:
            attending = max(attending, tile_floats(self._span, workspace.head_dim))
        workspace.run(layers, given, x.numel() // x.shape[-1], attending)

    def _arguments_of(
        self, layer: CompiledLayer, x: Any, kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Return where a layer's K and V, angles and plan are; None if its call is not known."""
        program, cache = layer.program, compat.given_cache(kwargs)
        if type(cache) is not SlotCache:
            return None
        held: Any = cache.layers[program.layer_index]
        if type(held) is not SlotLayer or held.index is not None:
            return None
        stores, heads = held.stores, (program.shared_heads, program.head_dim)
        if not stores.k_store.shape[2]:
            empty = x.new_empty(1, heads[0], 0, heads[1])
            stores.shape(held.group.capacity, empty, empty)
        k, v = stores.k_store, stores.v_store
        whole = len(held.group.dropped), held.group.capacity, *heads
        if not (k.dtype is v.dtype is program.dtype and k.shape == v.shape == whole):
            return None
        if not (k.is_contiguous() and v.is_contiguous() and k.is_cpu):
            return None
        own = program.head_dim, program.is_rotated, x.dtype
        given = (*kwargs.values(), layer.module.self_attn.config, held.group, *own)
        if len(given) != len(self._known) or not all(map(operator.is_, given, self._known)):
            self._shared = self._shared_by_layers(layer, x, kwargs, held.group)
            self._known = given
        shared = self._shared
        return None if shared is None else (0, 0, k.data_ptr(), v.data_ptr(), *shared)

    def _shared_by_layers(
        self, layer: CompiledLayer, x: Any, kwargs: dict[str, Any], group: Any
    ) -> tuple[int, int, int, int, int] | None:
        """Return the arguments that layers with the same keywords share."""
        if any(kwargs[name] is not None for name in kwargs.keys() - _READ) or x.dim() != 3:
            return None
        module = layer.module.self_attn
        name = attention.own_name(module.config) or "eager"
        function, is_stock = attention.registered(self._context, name, module)
        caps = getattr(module, "attn_logit_softcapping", None)  # which torch's looks past
        if not is_stock or (caps and function is compat.SDPA):
            return None
        mask = kwargs.get("attention_mask")
        most = segment_of(x.dtype, x.shape[0] * x.shape[1])
        key = id(mask), id(group), most
        if key not in self._plans:
            self._plans[key] = plan_for(self._context, mask, group, x.shape[0], x.shape[1], most)
            self._held.append(mask)  # keeps its id taken
        plan = self._plans[key]
        if plan is None:
            return None
        self._pitch, self._slots = max(self._pitch, plan.pitch), plan.slots
        if most > SIDE_BY_SIDE:
            self._span = max(self._span, plan.span)
        if not layer.program.is_rotated:
            return plan.address, 0, 0, 0, 0
        angles = _angles(kwargs.get("position_embeddings"), x, layer.program.head_dim)
        if angles is None:
            return None
        self._held += angles
        cos, sin = angles
        is_wide = int(cos.dtype is not x.dtype)
        return plan.address, cos.data_ptr(), sin.data_ptr(), cos.shape[-1], is_wide

    def _linear(self, layer: CompiledLayer, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(*x.shape[:-1], layer.program.outputs)
        self._run([layer], [(x.data_ptr(), out.data_ptr(), *_NOTHING[2:])], x)
        if layer.is_trusted is None:
            own: torch.Tensor = compat.own_call(layer.module, x)
            self._judge(layer, own, _agree(out, own, own))
            if not layer.is_trusted:
                self.num_own += 1
                return own
        self.num_computed += 1
        return out

    def _try(
        self, layer: CompiledLayer, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments
    ) -> torch.Tensor:
        """Run a layer's own code, then the kernels, and compare the results."""
        x: torch.Tensor = args[0]
        stores = compat.given_cache(kwargs).layers[layer.program.layer_index].stores
        self._is_trial = True
        try:
            own: torch.Tensor = compat.own_call(layer.module, *args, **kwargs)
        finally:
            self._is_trial = False
        slots, out = torch.from_numpy(self._slots), x.clone()
        written = [store.flatten(0, 1) for store in (stores.k_store, stores.v_store)]
        kept = [store[slots] for store in written]
        self._run([layer], [(out.data_ptr(), *given[1:])], x)
        agrees = _agree(out, own, own - x)
        agrees &= all(_agree(w[slots], k, k) for w, k in zip(written, kept, strict=True))
        self._judge(layer, own, agrees)
        if agrees:
            self.num_computed += 1
            return out
        for store, before in zip(written, kept, strict=True):
            store[slots] = before
        self.num_own += 1
        return own

    def _judge(self, layer: CompiledLayer, own: torch.Tensor, agrees: bool) -> None:
        """Remember whether a layer agrees with its module; NaN proves nothing."""
        if bool(own.isfinite().all()):
            layer.is_trusted = agrees
            if not agrees:
                self.reasons.add(execution.DIFFERED)


def _refusal(layer: CompiledLayer, x: Any) -> str | None:
    """Return why a layer runs its own code, None if the kernels may compute it."""
    program = layer.program
    if layer.is_trusted is False:
        return execution.DIFFERED
    if torch.is_grad_enabled() or compat.is_autocast():
        return execution.GRADIENTS
    if (
        type(x) is not torch.Tensor
        or x.dtype is not program.dtype
        or x.shape[-1] != program.size
        or not x.numel()
        or not (x.is_cpu and x.is_contiguous())
    ):
        return execution.OTHER_NUMBERS
    if x.numel() > MOST_TOKENS * program.size:
        return execution.TOO_LARGE_A_BLOCK
    return program.watch.refusal()


def _angles(given: Any, x: torch.Tensor, head_dim: int) -> list[torch.Tensor] | None:
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    cos, sin = given
    if not all(type(each) is torch.Tensor and each.is_cpu for each in given):
        return None
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[1] != x.shape[1]:
        return None
    if cos.dtype is not sin.dtype or cos.dtype not in (x.dtype, torch.float32):
        return None
    if cos.shape[0] not in (1, x.shape[0]) or cos.shape[2] % 2 or cos.shape[2] > head_dim:
        return None
    return [each.expand(x.shape[0], -1, -1).contiguous() for each in given]


def _agree(ours: torch.Tensor, own: torch.Tensor, added: torch.Tensor) -> bool:
    by_added, by_whole = TOLERANCES[own.dtype]
    limit = by_added * _size(added) + by_whole * _size(own)
    return _size(ours.float() - own.float()) <= limit


def _size(numbers: torch.Tensor) -> float:
    return float(numbers.float().pow(2).mean().sqrt())

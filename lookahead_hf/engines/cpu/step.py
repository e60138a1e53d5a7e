"""One forward in which compiled kernels compute layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead_hf.cache.slots import SlotCache, SlotLayer
from lookahead_hf.call import execution
from lookahead_hf.engines.cpu.kernels.fields import SIDE_BY_SIDE
from lookahead_hf.engines.cpu.kernels.program import MOST_TOKENS, Plan, segment_of, tile_floats
from lookahead_hf.engines.cpu.workspace import ARGUMENTS, CompiledLayer, Workspace, plan_for
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

STREAM, OUT, PLAN = map(ARGUMENTS.index, ("stream", "out", "plan"))
"""Places of some arguments among a layer's."""

_Noted = tuple[CompiledLayer, dict[str, Any]]  # a layer and the keywords of its call


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
        self._noted: list[_Noted] = []
        self._stream: Any = None  # the numbers that noted layers work on in place
        self._next = self._pitch = self._span = 0
        self._is_trial = False
        self._held, self._plans = list[Any](), dict[int, Plan]()  # plans by address
        self._shared: dict[tuple[Any, ...], tuple[int, ...] | None] = {}  # by what it depends on
        self.num_computed, self.num_own, self.reasons = 0, 0, set[str]()

    def call(
        self, layer: CompiledLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Compute a layer, or note it for the last one to compute; None if it runs its own code.

        Broken if layers were noted, and this one does not follow them, or its call is not known.
        """
        if self._is_trial:
            return None
        x: Any = args[0] if len(args) == 1 else None
        if not self._noted:
            notes_all = layer.first == 0 and self._last is not None and not self._watch.refusal()
            reason = _refusal(layer, x) or (None if notes_all else layer.program.watch.refusal())
            if reason is None and layer.program.layer_index is None:
                return self._linear(layer, x)
            given = None if reason else self._arguments_of([(layer, kwargs)], x)
            if given is None:
                self.reasons.add(reason or execution.OTHER_ARGUMENTS)
                self.num_own += 1
                return None
            if layer.is_trusted is None:
                return self._try(layer, args, kwargs, given)
            self._stream = x.clone()
            if not notes_all:
                return self._compute([layer], given)
        elif x is not self._stream or layer.first != self._next:
            raise Broken
        self._noted.append((layer, kwargs))
        self._next = layer.first + len(layer.program.ops)
        if layer is self._last:
            given = self._arguments_of(self._noted, x)
            if given is None:
                raise Broken
            self._compute([each for each, _ in self._noted], given)
            self._noted = []
        return self._stream

    def finish(self) -> None:
        """End the forward; Broken if it went on without the last layer."""
        if self._noted:
            raise Broken

    def _compute(self, layers: list[CompiledLayer], given: np.ndarray) -> torch.Tensor:
        self._run(layers, given, self._stream)
        self.num_computed += len(layers)
        return self._stream

    def _run(self, layers: list[CompiledLayer], given: np.ndarray, x: torch.Tensor) -> None:
        workspace = self.workspace
        attending = SEGMENT * (self._pitch + 2 * workspace.head_dim) + 128
        if self._span:
            attending = max(attending, tile_floats(self._span, workspace.head_dim))
        given[:, STREAM] = x.data_ptr()
        workspace.run(layers, given, x.numel() // x.shape[-1], attending)

    def _arguments_of(self, noted: list[_Noted], x: Any) -> np.ndarray | None:
        """Return where layers' K and V, angles and plans are; None if a call is not known.

        The arguments are [layers, arguments] int64, without the address of `x`.
        """
        found = list[int]()
        for layer, kwargs in noted:
            program, cache = layer.program, compat.given_cache(kwargs)
            held: Any = cache.layers[program.layer_index] if type(cache) is SlotCache else None
            if type(held) is not SlotLayer or held.index is not None:
                return None
            group, stores, heads = held.group, held.stores, (program.shared_heads, program.head_dim)
            if not stores.k_store.shape[2]:
                empty = x.new_empty(1, heads[0], 0, heads[1])
                stores.shape(group.capacity, empty, empty)
            k, v = stores.k_store, stores.v_store
            whole = len(group.dropped), group.capacity, *heads
            if not (k.dtype is v.dtype is program.dtype and k.shape == v.shape == whole):
                return None
            if not (k.is_contiguous() and v.is_contiguous() and k.is_cpu):
                return None
            own = group, layer.attention.config, *kwargs.values()
            key = (*kwargs, *map(id, own), *heads, program.is_rotated, x.shape, x.dtype)
            if key not in self._shared:
                self._shared[key] = self._shared_by_layers(layer, x, kwargs, group)
                self._held += own  # keeps their ids taken
            if (shared := self._shared[key]) is None:
                return None
            found += (0, 0, k.data_ptr(), v.data_ptr(), *shared)
        return np.array(found, np.int64).reshape(len(noted), -1)

    def _shared_by_layers(
        self, layer: CompiledLayer, x: Any, kwargs: dict[str, Any], group: Any
    ) -> tuple[int, int, int, int, int] | None:
        """Return the arguments that layers with the same keywords share."""
        if any(kwargs[name] is not None for name in kwargs.keys() - _READ) or x.dim() != 3:
            return None
        module = layer.attention
        name = attention.own_name(module.config) or "eager"
        function, is_stock = attention.registered(self._context, name, module)
        caps = getattr(module, "attn_logit_softcapping", None)  # which torch's looks past
        if not is_stock or (caps and function is compat.SDPA):
            return None
        mask = kwargs.get("attention_mask")
        most = segment_of(x.dtype, x.shape[0] * x.shape[1])
        plan = plan_for(self._context, mask, group, x.shape[0], x.shape[1], most)
        if plan is None:
            return None
        self._plans[plan.address] = plan
        self._pitch = max(self._pitch, plan.pitch)
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
        given = np.zeros((1, len(ARGUMENTS)), np.int64)
        given[0, OUT] = out.data_ptr()
        self._run([layer], given, x)
        if layer.is_trusted is None:
            own: torch.Tensor = compat.own_call(layer.module, x)
            self._judge(layer, own, _agree(out, own, own))
            if not layer.is_trusted:
                self.num_own += 1
                return own
        self.num_computed += 1
        return out

    def _try(
        self, layer: CompiledLayer, args: tuple[Any, ...], kwargs: dict[str, Any], given: np.ndarray
    ) -> torch.Tensor:
        """Run a layer's own code, then the kernels, and compare the results."""
        x: torch.Tensor = args[0]
        stores = compat.given_cache(kwargs).layers[layer.program.layer_index].stores
        self._is_trial = True
        try:
            own: torch.Tensor = compat.own_call(layer.module, *args, **kwargs)
        finally:
            self._is_trial = False
        plan = self._plans[given[0, PLAN]]
        slots, out = torch.from_numpy(plan.slots), x.clone()
        written = [store.flatten(0, 1) for store in (stores.k_store, stores.v_store)]
        kept = [store[slots] for store in written]
        self._run([layer], given, out)
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
    """Return why a layer, if nobody has changed it, runs its own code, None if it need not."""
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
    return execution.TOO_LARGE_A_BLOCK if x.numel() > MOST_TOKENS * program.size else None


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

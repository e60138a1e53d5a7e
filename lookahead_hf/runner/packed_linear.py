"""Linear layers that multiply by packed copies of their weights in our steps on a CPU.

oneDNN lays a weight out anew in every multiplication by a block of tokens; a copy that is kept in
that layout saves this work. For the length of a step, a stand-in lies under the `__call__` of each
`nn.Linear`. It multiplies by the copy where the layer would do nothing but multiply by the weight
that was copied, and calls the layer in every other case. All other code stays the model's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from lookahead_hf.model_state import state_of
from lookahead_hf.runner.packed_weights import Group, Multiply, checksum, fits, most_tokens, pack

_logger = logging.getLogger(__name__)

PACKED_AFTER = 96
"""Steps of a model after which "auto" packs its weights, which takes as long as twenty steps."""

_CALL = "_compiled_call_impl"
"""The attribute that torch calls in place of a module's hooks and forward. Copies and pickles of a
module leave it out, so that a model can be copied and saved in the middle of a step."""

_LINEAR, _FORWARD = torch._C._nn.linear, nn.Linear.forward
_IS_PATCHED = getattr(_FORWARD, "__globals__", None) is not vars(torch.nn.modules.linear)


class _Thread(threading.local):
    """What a model's stand-ins share on one thread: steps in progress, and the latest product.

    The product is of layers that read the same input: the packed weights, the input, what tells
    whether the input was written to since, and the outputs that no layer has returned yet.
    """

    depth = 0
    num_products = 0
    product: tuple[Any, Any, Any, list[Any]] = (None, None, None, [])


class _StandIn:
    """Multiplies by a packed copy in place of one layer.

    Layers that read the same input are joined: the first of them to be called multiplies for all.
    """

    def __init__(
        self, module: nn.Linear, index: int, sizes: list[int], multiply: Multiply, most: int
    ) -> None:
        self.module = ref(module)  # what is kept of a model must not keep the model alive
        self.weight = weight = module.weight
        self.address, self.dtype = weight.data_ptr(), weight.dtype
        self.version = None if weight.is_inference() else weight._version
        self.checksum = checksum(weight)
        self.index, self.sizes, self.multiply = index, sizes, multiply
        self.most_elements = most * weight.shape[1]

    def is_current(self) -> bool:
        """Whether the module still holds the weight that was packed, bit for bit.

        Writes through `.data`, such as PEFT's merging, leave torch's count of writes as it is. To
        read 270 MB of weights takes 11 ms, as long as a step; a sample of 64 elements of each
        weight would take 1.3 ms and miss the edit of a single row.
        """
        module = self.module()
        holds = module is not None and self._holds(module)
        return holds and checksum(self.weight) == self.checksum

    def _holds(self, module: nn.Linear) -> bool:
        weight, parameters = self.weight, module._parameters
        return (
            parameters.get("weight") is weight
            and weight.data_ptr() == self.address
            and (self.version is None or weight._version == self.version)
            and (len(self.sizes) == 1 or parameters.get("bias") is None)
        )

    def __call__(self, thread: _Thread, input: torch.Tensor) -> torch.Tensor:
        module = self.module()
        assert module is not None
        if (
            not thread.depth
            or type(input) is not torch.Tensor
            or input.dtype is not self.dtype
            or not 0 < input.numel() <= self.most_elements
            or not input.is_contiguous()
            or not self._holds(module)
            or not _only_multiplies(module)
        ):
            own: torch.Tensor = module._call_impl(input)
            return own
        thread.num_products += 1
        if len(self.sizes) == 1:
            return self.multiply(input, module._parameters.get("bias"))
        return self._part(thread, input)

    def _part(self, thread: _Thread, x: torch.Tensor) -> torch.Tensor:
        """Return this layer's part of the joined product."""
        multiply, given, stamp, parts = thread.product
        is_same = multiply is self.multiply and given is x and _is_unwritten(x, stamp)
        if not is_same or parts[self.index] is None:  # None: the layer is called a second time
            parts = [*self.multiply(x, None).split_with_sizes(self.sizes, -1)]
            thread.product = self.multiply, x, _stamp(x), parts
        part: torch.Tensor = parts[self.index]
        parts[self.index] = None
        return part.contiguous()


def _only_multiplies(module: nn.Module) -> bool:
    """Whether a call of a module does no more than multiply by its weight, and nobody watches.

    This is asked in every call, since code inside a forward may hook, patch or switch anything.
    """
    return (
        type(module) is nn.Linear
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
        and nn.Linear.forward is _FORWARD
        and functional.linear is _LINEAR
        and not torch_module._global_forward_hooks
        and not torch_module._global_forward_pre_hooks
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
    )


def _stamp(x: torch.Tensor) -> Any:
    """Return what tells later whether a tensor was written to: torch's count, or else a copy."""
    return x.clone() if x.is_inference() else x._version


def _is_unwritten(x: torch.Tensor, stamp: Any) -> bool:
    return torch.equal(x, stamp) if isinstance(stamp, torch.Tensor) else x._version == stamp


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that the bits of a product may depend on."""
    mkldnn: Any = torch.backends.mkldnn
    return torch.get_num_threads(), mkldnn.enabled, mkldnn.matmul.fp32_precision


@contextmanager
def _laid(calls: list[tuple[Any, Any]]) -> Iterator[None]:
    """Lay calls under modules; a module that `torch.compile` has given one keeps it."""
    for module, call in calls:
        vars(module).setdefault(_CALL, call)
    try:
        yield
    finally:
        for module, call in calls:
            if vars(module).get(_CALL) is call:
                del vars(module)[_CALL]


class PackedLinears:
    """The packed linear layers of one model, kept between calls.

    Attributes:
        num_steps: Steps of the model since its weights were last seen to change.
        stand_ins: One per packed layer; None before packing was tried.
        lacks_memory: Whether packing was put off for want of memory.
        same_bits: Whether packed layers return the very bits of the model's own.
        packing: Held by the step that packs.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.stand_ins: list[_StandIn] | None = None
        self.lacks_memory = self.same_bits = False
        self.packing, self._lock = threading.Lock(), threading.Lock()
        self._thread, self._settings = _Thread(), _settings()
        self._num_users, self._laid = 0, ExitStack()

    @property
    def num_products(self) -> int:
        """Multiplications by copies on this thread so far."""
        return self._thread.num_products

    def are_ready(self) -> bool:
        """Whether there are packed layers, made under the settings that torch has now."""
        return bool(self.stand_ins) and self._settings == _settings()

    def are_current(self) -> bool:
        """Whether everything is as it was when the weights were packed."""
        each = self.stand_ins or ()
        return not each or (self.are_ready() and all(stand_in.is_current() for stand_in in each))

    @contextmanager
    def laid_under(self) -> Iterator[None]:
        """Let this thread's calls of the layers go through their stand-ins."""
        thread = self._thread
        with self._lock:
            if not self._num_users:
                calls = [(each.module(), partial(each, thread)) for each in self.stand_ins or ()]
                self._laid.enter_context(_laid([call for call in calls if call[0] is not None]))
            self._num_users += 1
        thread.depth += 1
        try:
            yield
        finally:
            thread.depth -= 1
            thread.product = _Thread.product
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._laid.close()

    def pack(self, blocks: list[list[nn.Linear]], insists: bool) -> None:
        """Pack the layers that gain by it; a block that does not gain is tried layer by layer.

        Args:
            blocks: Layers that read the same input.
            insists: Whether to pack however little memory is free.
        """
        if not insists and not fits(map(_group, blocks)):
            self.lacks_memory = True
            return
        self._settings, made = _settings(), list[_StandIn]()
        limits: dict[Any, int] = {}  # the first of every shape is tried
        try:
            for block in blocks:
                for part in _parts(block, limits):
                    multiply, sizes = pack(_group(part)), [len(module.weight) for module in part]
                    made += [
                        _StandIn(module, index, sizes, multiply, limits[_kind(part)])
                        for index, module in enumerate(part)
                    ]
        except (RuntimeError, MemoryError) as error:  # torch raises both when memory runs out
            _logger.info("weights are not packed: %s", error)
            made = []
        self.same_bits = all(each.dtype != torch.float32 for each in made)
        self.stand_ins = made


def _group(block: list[nn.Linear]) -> Group:
    return tuple((module.weight, module.bias) for module in block)


def _kind(block: list[nn.Linear]) -> Any:
    return tuple(
        (tuple(weight.shape), weight.dtype, bias is None) for weight, bias in _group(block)
    )


def _parts(block: list[nn.Linear], limits: dict[Any, int]) -> list[list[nn.Linear]]:
    """Return what of a block is to be packed: all layers together, or single ones that gain."""
    for parts in ([block], [[module] for module in block]):
        for part in parts:
            if _kind(part) not in limits:
                limits[_kind(part)] = most_tokens(_group(part))
        parts = [part for part in parts if limits[_kind(part)]]
        if parts:
            return parts
    return []


class _Observer:
    """Finds out in one step which layers are called, and which of them read the same input."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: list[list[nn.Linear]] = []
        self._seen: set[nn.Module] = set()
        self._input: tuple[Any, Any] = (None, None)
        self._thread = threading.get_ident()
        self.calls = [(m, partial(self._call, m)) for m in model.modules() if _may_be_packed(m)]

    def _call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and threading.get_ident() == self._thread and _only_multiplies(module):
            self._note(module, args[0])
        return module._call_impl(*args, **kwargs)

    def _note(self, module: nn.Linear, x: torch.Tensor) -> None:
        """Join a layer to the ones before it where all of them read the same tensor."""
        (given, stamp), joins = self._input, module.bias is None
        if module in self._seen:
            self._input = None, None
        elif joins and x is given and _is_unwritten(x, stamp):
            self.blocks[-1].append(module)
        else:
            self.blocks.append([module])
            self._input = (x, _stamp(x)) if joins else (None, None)
        self._seen.add(module)


def _may_be_packed(module: nn.Module) -> bool:
    """Whether a module is a linear layer with an ordinary weight on the CPU."""
    if type(module) is not nn.Linear or _IS_PATCHED:
        return False
    return type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"


class PackedSteps:
    """How the steps of one call use packed layers.

    Attributes:
        is_used: Whether the latest step used packed copies, or the next one can.
        is_typical: Whether the latest step did nothing but its forward. The step that packs does
            not tell what steps cost.
    """

    def __init__(
        self, model: nn.Module, wanted: str | bool = "auto", after: int = PACKED_AFTER
    ) -> None:
        """Go on with what is kept of the model, unless its weights have changed.

        Args:
            model: The target.
            wanted: As `packed_weights` in `SpeculativeConfig`.
            after: Steps of the model after which "auto" packs.
        """
        self._model, self._wanted, self._after = model, wanted, after
        self.is_typical = True
        kept = self._kept()
        if kept is not None and not kept.are_current():
            state_of(model).packed = None  # to be packed after as many steps as the first time
            kept = None
        self.is_used = kept is not None and kept.are_ready()

    def _kept(self, create: bool = False) -> PackedLinears | None:
        """Return what is kept of the model, None where the call does not want it."""
        if self._wanted is False:
            return None
        state = state_of(self._model)
        with state.lock:
            if state.packed is None and create:
                state.packed = PackedLinears()
            return state.packed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside: with packed layers, or watched where it is time to pack them."""
        self.is_typical = True
        kept = self._kept(create=True)
        if kept is None:
            yield
            return
        kept.num_steps += 1
        if kept.are_ready():
            before = kept.num_products
            with kept.laid_under():
                yield
            self.is_used = kept.num_products > before
        elif self._is_due(kept) and kept.packing.acquire(blocking=False):
            try:
                observer = _Observer(self._model)
                with _laid(observer.calls):
                    yield
                self.is_typical = False
                kept.pack(observer.blocks, self._wanted is True)
            finally:
                kept.packing.release()
            self.is_used = kept.are_ready()
        else:
            self.is_used = False
            yield

    def _is_due(self, kept: PackedLinears) -> bool:
        due = kept.num_steps > self._after and not kept.lacks_memory
        return kept.stand_ins is None and (due or self._wanted is True)

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Run the prompt inside, with packed layers where they give plain's bits.

        They save the same time for a prompt of any length: of a multiplication by 64 tokens a
        third, by 256 a quarter.
        """
        kept = self._kept()
        with ExitStack() as stack:
            if kept is not None and kept.same_bits and kept.are_ready():
                stack.enter_context(kept.laid_under())
            yield

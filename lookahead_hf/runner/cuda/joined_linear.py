"""Linear layers that read the same input, computed in one product on a GPU.

The weights of an attention's projections, or of a gate and what it gates, move into one new tensor.
During a step, a stand-in under each of these layers returns its part of the product by the whole
(`stand_ins.py`). To all other code the weights are what they were, at another address.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn import functional

from lookahead_hf.model_state import state_of
from lookahead_hf.runner.guards import addresses, functions_are_watched
from lookahead_hf.runner.stand_ins import (
    InputObserver,
    OnThread,
    StandIns,
    laid,
    linear_is_torchs,
    only_multiplies,
)

_logger = logging.getLogger(__name__)

TRIED_TOKENS = 4
"""Tokens per row of the steps that find out which layers can be joined, and whether they are."""

MOST_DIFFERENCE = 0.2
"""Most that joined layers may change the logits of a step, relative to how these vary. Rounding in
bfloat16 gives some percent; code that takes the parts of a product for whole tensors gives 1."""

ALIGNED = 16
"""Bytes that a weight's address is a multiple of, so that kernels load it as before."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Product:
    """The product by several layers' weights, which lie in one tensor."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._sizes = [len(layer.weight) for layer in layers]
        self._weight = _moved_together([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _moved_together(biases) if biases else None  # all have one, or none has

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.linear(x, self._weight, self._bias).split(self._sizes, -1)


def _moved_together(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move parameters into one new tensor, [all out, ...], and return it.

    Each gets a storage of its own that is a piece of the tensor's: nothing that saves or copies a
    model takes them for shared weights. They keep their values, and the tensor sees every write.
    """
    with torch.no_grad(), torch.inference_mode(False):
        whole = torch.cat([parameter.detach() for parameter in parameters])
        storage, begin = whole.untyped_storage(), 0
        for parameter in parameters:
            piece: Any = storage[begin : begin + parameter.nbytes]
            place = torch.empty(0, dtype=whole.dtype, device=whole.device)
            parameter.data = place.set_(piece, 0, parameter.shape, parameter.stride())
            begin += parameter.nbytes
    return whole


class _StandIn:
    """Returns one layer's part of the product of several layers."""

    def __init__(self, thread: OnThread, layer: nn.Linear, index: int, product: _Product) -> None:
        self.module = ref(layer)
        self._thread, self._index, self._product = thread, index, product
        self._places = _places(layer)

    def is_current(self) -> bool:
        """Whether the layer still has the parameters that are part of the product."""
        layer = self.module()
        return layer is not None and _places(layer) == self._places

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer, thread = self.module(), self._thread
        assert layer is not None
        if (
            not thread.depth
            or type(input) is not torch.Tensor
            or input.is_inference()  # torch does not count writes to it
            or not self.is_current()
            or not only_multiplies(layer)
        ):
            return layer._call_impl(input)
        thread.num_products += 1
        return thread.part(self._index, input, self._product, self._product)


def _places(layer: nn.Linear) -> list[Any]:
    """Where the layer's parameters are."""
    held = (layer._parameters.get(name) for name in ("weight", "bias"))
    return [None if each is None else addresses(each) for each in held]


class JoinedLinears(StandIns):
    """The joined layers of one model, kept between calls."""

    def __init__(self, blocks: list[list[nn.Linear]]) -> None:
        """Join the layers of every block; where memory runs out, those of the blocks before it."""
        super().__init__()
        try:
            for block in blocks:
                product = _Product(block)
                self.stand_ins += (
                    _StandIn(self.thread, layer, index, product)
                    for index, layer in enumerate(block)
                )
        except RuntimeError as error:
            _logger.info("not all layers of one input are joined: %s", error)

    def are_current(self) -> bool:
        """Whether the layers have the parameters that were joined."""
        return all(stand_in.is_current() for stand_in in self.stand_ins)

    def take_apart(self) -> None:
        """Give the parameters that are still joined storages of their own, as they had before."""
        for stand_in in self.stand_ins:
            layer = stand_in.module()
            if layer is not None and stand_in.is_current():
                with torch.no_grad(), torch.inference_mode(False):
                    for parameter in layer.parameters(recurse=False):
                        parameter.data = parameter.detach().clone()

    @contextmanager
    def laid_under(self) -> Iterator[None]:
        """Let this thread's calls of the layers go through their stand-ins, if nobody watches."""
        with nullcontext() if _is_watched() else super().laid_under():
            yield


def _is_watched() -> bool:
    """Whether anything but torch itself looks at what linear layers do."""
    return not linear_is_torchs() or functions_are_watched()


def joined(model: nn.Module, step: Callable[[], torch.Tensor]) -> JoinedLinears | None:
    """Return a model's joined layers; join them first if it has none.

    The weights move only while no other call of ours runs the model and nobody watches.

    Args:
        model: The target.
        step: Runs a step that leaves no trace, and returns its logits.

    Returns:
        The joined layers, None where nothing is joined.
    """
    state = state_of(model)
    kept = state.joined
    if kept is None or not kept.are_current():
        is_alone = len(state.attention_users) <= 1
        if not is_alone or _is_watched() or torch.is_inference_mode_enabled():
            return None
        if kept is not None:
            kept.take_apart()
        kept = state.joined = _join(model, step)
    return kept if kept.stand_ins else None


def _join(model: nn.Module, step: Callable[[], torch.Tensor]) -> JoinedLinears:
    """Join what reads the same input in one step, and compare another step's logits."""
    observer = InputObserver(_joinable(model), joins_biases=True)
    with laid(observer.calls, set()):
        own = step().clone()
    made = JoinedLinears([block for block in observer.blocks if len(block) > 1])
    try:
        with made.laid_under():
            agrees = not made.stand_ins or _agree(step(), own)
    except RuntimeError as error:
        _logger.info("layers of one input are not joined: %s", error)
        agrees = False
    if not agrees:
        made.stand_ins = []  # the weights may stay together
    return made


def _agree(logits: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether logits are the same up to rounding, where the model's own are finite."""
    finite = own.isfinite()
    own, logits = own[finite].float(), logits[finite].float()
    return bool((logits - own).norm() <= MOST_DIFFERENCE * (own - own.mean()).norm())


def _joinable(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield linear layers whose parameters are nobody else's, and no part of anything.

    An adapter and the layer in it are left to what loads, merges and removes adapters.
    """
    adapters = (each for each in model.modules() if "base_layer" in each._modules)
    adapted = {inner for adapter in adapters for inner in adapter.modules()}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    shares = Counter(tensor.data_ptr() for _, tensor in named)
    for module in model.modules():
        if type(module) is nn.Linear and module not in adapted:
            own = [each for each in (module.weight, module.bias) if each is not None]
            if all(_may_move(each) and shares[each.data_ptr()] == 1 for each in own):
                yield module


def _may_move(parameter: torch.Tensor) -> bool:
    """Whether a parameter is an ordinary tensor that fills a storage of its own.

    A piece of a storage, which cannot be resized, may be part of another model's product.
    """
    return (
        type(parameter) is nn.Parameter
        and parameter.dtype in _DTYPES
        and not parameter.is_inference()
        and parameter.is_contiguous()
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        and parameter.nbytes % ALIGNED == 0
        and parameter.untyped_storage().resizable()
        and _num_holders(parameter) == _num_holders(nn.Parameter(torch.empty(1)))
    )


def _num_holders(tensor: torch.Tensor) -> int:
    """Return torch's count of what holds the storage, which aliases elsewhere raise.

    A state dict that somebody keeps is such an alias: writes to it must reach the layer.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

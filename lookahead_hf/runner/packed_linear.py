"""Linear layers that multiply by packed copies of their weights in our steps on a CPU.

oneDNN lays a weight out anew in every multiplication by a block of tokens; a copy that is kept in
that layout saves this work. During a step, a stand-in under each layer multiplies by the copy
(`stand_ins.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from lookahead_hf.runner.packed_weights import (
    Group,
    Multiply,
    checks_are_fast,
    checksum,
    fits,
    pack,
    served_tokens,
)
from lookahead_hf.runner.stand_ins import NO_PRODUCT, OnThread, StandIns, only_multiplies

_logger = logging.getLogger(__name__)


class _StandIn:
    """Multiplies by a packed copy in place of one layer.

    Layers that read the same input are joined: the first of them to be called multiplies for all.
    """

    def __init__(
        self,
        thread: OnThread,
        module: nn.Linear,
        index: int,
        sizes: list[int],
        multiply: Multiply,
        served: range,
    ) -> None:
        self.thread, self.module = thread, ref(module)
        self.weight = weight = module.weight
        self.address, self.dtype = weight.data_ptr(), weight.dtype
        self.version = None if weight.is_inference() else weight._version
        self.checksum = checksum(weight)
        self.index, self.sizes, self.multiply = index, sizes, multiply
        self.terms = weight.shape[1]
        self.fewest, self.most = served[0] * self.terms, served[-1] * self.terms

    def is_current(self) -> bool:
        """Whether the module still holds the weight that was packed, bit for bit.

        Writes through `.data`, such as PEFT's merging, leave torch's count of writes as it is. To
        read 270 MB of weights takes 18 ms, half of a step; a sample of 64 elements of each weight
        would take 1.3 ms and miss the edit of a single row.
        """
        module = self.module()
        holds = module is not None and self._holds(module._parameters)
        return holds and torch.equal(checksum(self.weight), self.checksum)

    def _holds(self, parameters: Any) -> bool:
        weight = self.weight
        return (
            parameters.get("weight") is weight
            and weight.data_ptr() == self.address
            and (self.version is None or weight._version == self.version)
            and (len(self.sizes) == 1 or parameters.get("bias") is None)
        )

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        thread, module = self.thread, self.module()
        assert module is not None
        if (
            not thread.depth
            or type(input) is not torch.Tensor
            or input.dtype is not self.dtype
            or not self.fewest <= input.numel() <= self.most
            or not input.is_contiguous()
            or not self._holds(module._parameters)
            or not only_multiplies(module)
        ):
            thread.product = NO_PRODUCT  # other code runs, which may write to the joined input
            own: torch.Tensor = module._call_impl(input)
            return own
        thread.num_products += 1
        if len(self.sizes) == 1:
            return self.multiply(input, module._parameters["bias"])
        return thread.part(self.index, input, self.multiply, self._products)

    def _products(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the outputs of all layers that are joined with this one."""
        # The parts of a single token are contiguous as they are.
        is_single = x.numel() == self.terms
        split: Any = torch.split_with_sizes if is_single else torch.split_with_sizes_copy
        outputs: Sequence[torch.Tensor] = split(self.multiply(x, None), self.sizes, -1)
        return outputs


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that the bits of a product may depend on."""
    mkldnn: Any = torch.backends.mkldnn
    return torch.get_num_threads(), mkldnn.enabled, mkldnn.matmul.fp32_precision


class PackedLinears(StandIns):
    """The packed linear layers of one model, kept between calls.

    Attributes:
        num_steps: Steps of the model since its weights were last seen to change.
        dtype: The model's dtype when packing was tried, None before that.
        same_bits: Whether packed layers return the very bits of the model's own.
        packing: Held by the step that packs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.dtype: torch.dtype | None = None
        self.same_bits = False
        self.packing = threading.Lock()
        self._settings = _settings()

    def are_ready(self) -> bool:
        """Whether there are packed layers, made under the settings that torch has now."""
        return bool(self.stand_ins) and self._settings == _settings()

    def are_current(self, dtype: torch.dtype | None) -> bool:
        """Whether a model of this dtype is what it was when packing was tried, if it was."""
        if self.dtype not in (None, dtype):
            return False
        each = self.stand_ins
        return not each or (self.are_ready() and all(stand_in.is_current() for stand_in in each))

    def pack(self, blocks: list[list[nn.Linear]], dtype: torch.dtype | None, insists: bool) -> None:
        """Pack the blocks that gain by it, or none where memory is short.

        Args:
            blocks: Layers that read the same input.
            dtype: The model's.
            insists: Whether to pack however little memory is free.
        """
        groups: list[Group] = [
            tuple((each.weight, each.bias) for each in block) for block in blocks
        ]
        if not insists and not fits(groups):
            self.num_steps = 0  # memory may be free after as many steps again
            return
        self._settings, self.dtype = _settings(), dtype
        try:
            made = self._made(blocks, groups)
        except (RuntimeError, MemoryError) as error:  # torch raises both when memory runs out
            _logger.info("weights are not packed: %s", error)
            return
        self.same_bits = all(each.dtype != torch.float32 for each in made)
        self.stand_ins = made

    def _made(self, blocks: list[list[nn.Linear]], groups: list[Group]) -> list[_StandIn]:
        """Pack the blocks that gain by it, of which the first of every shape is tried."""
        made: list[_StandIn] = []
        tried: dict[Any, range] = {}
        for block, group in zip(blocks, groups, strict=True):
            kind = tuple((weight.shape, weight.dtype, bias is None) for weight, bias in group)
            if kind not in tried:
                tried[kind] = served_tokens(group)
            served = tried[kind]
            if not served:
                continue
            if not made and not checks_are_fast(group[0][0]):
                break
            multiply, sizes = pack(group), [len(weight) for weight, _ in group]
            for index, module in enumerate(block):
                made.append(_StandIn(self.thread, module, index, sizes, multiply, served))
        return made

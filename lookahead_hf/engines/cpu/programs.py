"""Programs of layers: operations for the compiled kernels, and the state that they rely on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.fields import bits
from lookahead_hf.engines.cpu.kernels.program import is_ready
from lookahead_hf.model import compat
from lookahead_hf.runner.watch import Watch

PIECE, LARGE_PIECE, LARGE = 32, 128, 8192
"""Outputs of a piece of a linear layer, and of one with more outputs than `LARGE`."""


class Unknown(Exception):
    """There are no kernels for a layer; the message says why."""


class Place(NamedTuple):
    """A field of an operation that is filled in for a step."""

    op: int
    field: int
    of: int | str  # a parameter by its number, or the name of a buffer or an argument
    offset: int = 0  # bytes behind its address


@dataclass
class Program:
    """Operations of a layer, the fields to fill in, and what must stay as it was."""

    watch: Watch  # the modules whose code the operations replace
    ops: list[dict[int, int]] = field(default_factory=list)  # the constant fields of each operation
    weights: list[torch.Tensor] = field(default_factory=list)  # the parameters
    places: list[Place] = field(default_factory=list)  # fields that hold addresses
    buffers: dict[str, int] = field(default_factory=dict)  # numbers per token of each
    dtype: torch.dtype = torch.float32  # dtype of all parameters
    size: int = 0  # numbers per token of the input
    outputs: int = 0  # the same for the output of a lone linear layer
    layer_index: int | None = None  # index of the layer in the cache, None for a lone linear layer
    head_dim: int = 0  # numbers of a head
    shared_heads: int = 0  # heads of K and V
    is_rotated: bool = False  # whether the layer rotates heads
    norm_kind: int = fields.RMS  # which norm the layer's RMS norms are

    def add(self, kind: int, addresses: dict[int, Any], **given: int) -> None:
        """Add an operation with further fields, by their names in lower case.

        An address is, by its field, the name of a buffer or an argument; a parameter as its owner,
        name and first row; or None.
        """
        at = len(self.ops)
        self.ops.append(
            {fields.KIND: kind} | {getattr(fields, k.upper()): v for k, v in given.items()}
        )
        for place, of in addresses.items():
            if isinstance(of, str):
                self.places.append(Place(at, place, of))
            elif of is not None:
                self._read(at, place, *of)

    def _read(self, op: int, place: int, owner: nn.Module, name: str, row: int = 0) -> None:
        """Have an operation read a parameter, if there is one, from a row on."""
        tensor = compat.parameters_of(owner).get(name)
        if tensor is None:
            if name == "weight":
                raise Unknown(f"{type(owner).__name__} has no weight of its own")
            return
        numbers = [at for at, known in enumerate(self.weights) if known is tensor]
        if not numbers:
            self._check(tensor)
            numbers = [len(self.weights)]
            self.weights.append(tensor)
        offset = row * tensor.stride(0) * tensor.element_size()
        self.places.append(Place(op, place, numbers[0], offset))

    def _check(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not nn.Parameter:
            raise Unknown(f"a parameter is a {type(tensor).__name__}")
        is_whole = tensor.layout is torch.strided and tensor.is_contiguous() and tensor.is_cpu
        if not is_whole or tensor.is_neg() or not tensor.data_ptr():
            raise Unknown("a parameter is not in one piece on a CPU")
        if not self.weights:
            self.dtype = tensor.dtype
        if not is_ready(tensor.dtype) or tensor.dtype is not self.dtype:
            raise Unknown(f"it has weights of {tensor.dtype}, or of several types")

    def linear(self, module: Any, source: str, target: str, **given: Any) -> None:
        """Add a linear layer, or a range of its outputs, `rows`; what is "active" is packed."""
        check_linear(module)
        rows = given.pop("rows", range(module.weight.shape[0]))
        addresses: dict[int, Any] = {
            fields.SOURCE: source,
            fields.TARGET: target,
            fields.WEIGHT: (module, "weight", rows.start),
            fields.BIAS: (module, "bias", rows.start),
        }
        if given.get("mode") == fields.TO_SLOTS:
            addresses[fields.PLAN] = "plan"
        given = {"factor": bits(1.0), "packed": int(source == "active"), **given}
        sizes = {"size": module.weight.shape[1], "outputs": len(rows), "piece": piece_of(len(rows))}
        self.add(fields.LINEAR, addresses, **sizes, **given)

    def norm(self, module: Any, source: str, target: str, **given: int) -> None:
        """Add a norm of whole vectors."""
        flavour, epsilon = self.norm_of(module)
        addresses = {
            fields.SOURCE: source,
            fields.TARGET: target,
            fields.WEIGHT: (module, "weight"),
        }
        if flavour == fields.LAYER_NORM:
            addresses[fields.BIAS] = (module, "bias")
        sizes = {"size": len(module.weight), "heads": 1}
        self.add(fields.NORM, addresses, **sizes, flavour=flavour, epsilon=epsilon, **given)

    def norm_of(self, module: Any) -> tuple[int, int]:
        """Return which norm a module is, and the bits of its epsilon."""
        if type(module) is nn.LayerNorm:
            if module.weight is None or len(module.normalized_shape) != 1:
                raise Unknown("a layer norm has no weight, or several dimensions")
            return fields.LAYER_NORM, bits(module.eps)
        is_gemmas = self.norm_kind == fields.RMS_FROM_ONE
        return self.norm_kind, bits(module.eps if is_gemmas else module.variance_epsilon)


def check_linear(module: Any) -> None:
    """Check that a module is a linear layer with a matrix, and no bias that torch broadcasts."""
    if type(module) is not nn.Linear:
        raise Unknown(f"{type(module).__name__} is no plain linear layer")
    own = compat.parameters_of(module)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 2:
        raise Unknown("a linear layer has no matrix of its own")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise Unknown("a bias does not have a number for each output")


def piece_of(num_outputs: int) -> int:
    """Return the outputs of a linear layer that a thread computes at a time."""
    return PIECE if num_outputs <= LARGE else LARGE_PIECE

"""Programs of layers: operations for the compiled kernels, and the state that they rely on."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from lookahead_hf.engines.cpu.kernels import fields
from lookahead_hf.engines.cpu.kernels.fields import bits
from lookahead_hf.engines.cpu.kernels.program import is_ready
from lookahead_hf.engines.cpu.layers.code import NORM, is_known, is_own, own_names, unwrapped
from lookahead_hf.model import compat

# Read by `map`, since every step asks for them of every parameter.
_LAYOUT = operator.attrgetter("shape", "dtype", "is_cpu")
_STRIDE, _IS_NEGATIVE = torch.Tensor.stride, torch.Tensor.is_neg
_ADDRESS = torch.Tensor.data_ptr

PIECE, LARGE_PIECE, LARGE = 32, 128, 8192
"""Outputs of a piece of a linear layer, and of one with more outputs than `LARGE`."""


class Unknown(Exception):
    """There are no kernels for a layer; the message says why."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a parameter's memory on a CPU holds its numbers."""
    is_whole = type(tensor) is nn.Parameter and tensor.is_cpu and not tensor.is_neg()
    return is_whole and tensor.data_ptr() != 0


class Place(NamedTuple):
    """A field of an operation that is filled in for a step."""

    op: int
    field: int
    of: int | str  # a parameter by its number, or the name of a buffer or an argument
    offset: int = 0  # bytes behind its address


@dataclass
class Program:
    """Operations of a layer, the fields to fill in, and what must stay as it was.

    Attributes:
        ops: The constant fields of each operation.
        weights: The parameters.
        layouts: Their shapes, dtypes and kinds of device, as they were described.
        strides: Their strides.
        places: Fields that hold addresses.
        buffers: Numbers per token in each buffer of the layer.
        modules: The modules whose code the operations replace.
        attributes: Their attributes, except those of the first one, which holds our call.
        num_attributes: Number of these. A later one may hide a child or a method.
        kinds: Classes of the modules.
        hooks: Their dictionaries of hooks.
        held: Mappings that must still give `objects`.
        names: The keys of these objects in the mappings.
        objects: These objects.
        shared: The same for classes and the files that define them, by mapping and key.
        dtype: Dtype of all parameters.
        size: Numbers per token of the input.
        outputs: The same for the output of a lone linear layer.
        layer_index: Index of the layer in the cache, None for a lone linear layer.
        head_dim: Numbers of a head.
        shared_heads: Heads of K and V.
        group: Heads of queries that share one of these.
        is_rotated: Whether the layer rotates heads.
    """

    ops: list[dict[int, int]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    layouts: list[tuple[Any, ...]] = field(default_factory=list)
    strides: list[tuple[int, ...]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    num_attributes: int = 0
    kinds: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    shared: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    size: int = 0
    outputs: int = 0
    layer_index: int | None = None
    head_dim: int = 0
    shared_heads: int = 0
    group: int = 0
    is_rotated: bool = False

    def is_hooked(self) -> bool:
        """Return whether one of the modules has hooks."""
        return any(self.hooks)

    def is_changed(self) -> bool:
        """Return whether the modules are no longer as they were described."""
        weights = self.weights
        return not (
            all(map(operator.is_, map(dict.get, self.held, self.names), self.objects))
            and sum(map(len, self.attributes)) == self.num_attributes
            and list(map(type, self.modules)) == self.kinds
            and all(type(weight) is nn.Parameter for weight in weights)
            and list(map(_LAYOUT, weights)) == self.layouts
            and list(map(_STRIDE, weights)) == self.strides
            and not any(map(_IS_NEGATIVE, weights))
            and all(map(_ADDRESS, weights))
        )

    def hold(self, mapping: Any, name: str, known: Any) -> None:
        """Note that a mapping must keep this object."""
        self.held.append(mapping)
        self.names.append(name)
        self.objects.append(known)

    def floats(self, num_tokens: int) -> int:
        """Return the float32 numbers that a thread needs room for, attention aside."""
        piece, vector = self._largest
        return 2 * max(num_tokens * piece, vector) + fields.SIDE_BY_SIDE * vector + 64

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """The largest piece and vector of the operations, all of which have been added."""
        piece = max(op.get(fields.PIECE, 0) for op in self.ops)
        return piece, max(op.get(fields.SIZE, 0) for op in self.ops)

    def add(self, kind: int, addresses: dict[int, Any], **given: int) -> None:
        """Add an operation.

        Args:
            kind: Its kind.
            addresses: By field, the name of a buffer or an argument; a parameter as its owner,
                name and first row; or None.
            given: Other fields, by their names in lower case.
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
        self.hold(compat.parameters_of(owner), name, tensor)
        if tensor is None:
            if name == "weight":
                raise Unknown(f"{type(owner).__name__} has no weight of its own")
            return
        numbers = [at for at, known in enumerate(self.weights) if known is tensor]
        if not numbers:
            self._check(tensor)
            numbers = [len(self.weights)]
            self.weights.append(tensor)
            self.layouts.append(_LAYOUT(tensor))
            self.strides.append(tensor.stride())
        offset = row * tensor.stride(0) * tensor.element_size()
        self.places.append(Place(op, place, numbers[0], offset))

    def _check(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not nn.Parameter:
            raise Unknown(f"a parameter is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or not (is_plain(tensor) and tensor.is_contiguous()):
            raise Unknown("a parameter is not in one piece on a CPU")
        if not self.weights:
            self.dtype = tensor.dtype
        if not is_ready(tensor.dtype) or tensor.dtype is not self.dtype:
            raise Unknown(f"it has weights of {tensor.dtype}, or of several types")

    def replace(self, module: Any, part: str | None = None) -> Any:
        """Check that a module's code is known, and note that operations replace it."""
        kind: Any = type(module)
        if not (is_own(kind) if part is None else is_known(part, kind.forward)):
            raise Unknown(f"the code of {kind.__name__} is not known")
        if kind.__call__ is not nn.Module.__call__ and not _is_layer(kind):
            raise Unknown(f"{kind.__name__} has a call of its own")
        self.modules.append(module)
        self.kinds.append(kind)
        self.hooks += compat.hooks_of(module)
        own = vars(module)
        self.hold(own, "forward", None)
        if len(self.modules) > 1:
            if compat.CALL in own:
                raise Unknown(f"a {kind.__name__} has a call of its own")
            self.attributes.append(own)
            self.num_attributes += len(own)
        self.shared[id(kind), "__call__"] = kind, kind.__call__
        for name in ("forward", NORM):
            function = getattr(kind, name, None)
            if function is not None:
                self._hold_names(module, function)
                self.shared[id(kind), name] = kind, function
        return module

    def _hold_names(self, module: Any, function: Any) -> None:
        """Note the names that a function of a module looks up in the module and in its file."""
        own, names = vars(module), unwrapped(function)[-1].__code__.co_names
        children, drops = compat.children_of(module), _drops(module)
        if "training" in names and module.training and drops:
            raise Unknown("a dropout is active")
        for name in names:
            may_hide = module is self.modules[0] and hasattr(module, name)
            if (name in own or may_hide) and (name != "training" or drops):
                self.hold(own, name, own.get(name))
            if name in children:
                self.hold(children, name, children[name])
        for mapping, name, known in own_names(function):
            self.shared[id(mapping), name] = mapping, known

    def linear(self, module: Any, source: str, target: str, **given: Any) -> None:
        """Add a linear layer, or `rows` of one, a range of its outputs.

        `given` may also set `joins_next`, `mode`, `flavour` and `factor`.
        """
        if type(module) is not nn.Linear:
            raise Unknown(f"{type(module).__name__} is no plain linear layer")
        if all(known is not module for known in self.modules):
            self.replace(module)
        check_shape(module)
        rows = given.pop("rows", range(module.weight.shape[0]))
        addresses: dict[int, Any] = {
            fields.SOURCE: source,
            fields.TARGET: target,
            fields.WEIGHT: (module, "weight", rows.start),
            fields.BIAS: (module, "bias", rows.start),
        }
        if given.get("mode") == fields.TO_SLOTS:
            addresses[fields.PLAN] = "plan"
        given.setdefault("factor", bits(1.0))
        sizes = {"size": module.weight.shape[1], "outputs": len(rows), "piece": piece_of(len(rows))}
        self.add(fields.LINEAR, addresses, **sizes, **given)

    def norm(self, module: Any, source: str, target: str, heads: int = 1, **given: int) -> None:
        """Add a norm of whole vectors, `heads` per token."""
        flavour, epsilon = self.norm_of(module)
        addresses = {
            fields.SOURCE: source,
            fields.TARGET: target,
            fields.WEIGHT: (module, "weight"),
        }
        if flavour == fields.LAYER_NORM:
            addresses[fields.BIAS] = (module, "bias")
        sizes = {"size": len(module.weight), "heads": heads}
        self.add(fields.NORM, addresses, **sizes, flavour=flavour, epsilon=epsilon, **given)

    def norm_of(self, module: Any) -> tuple[int, int]:
        """Return which norm a module is, and the bits of its epsilon."""
        if type(module) is nn.LayerNorm:
            self.replace(module)
            if module.weight is None or len(module.normalized_shape) != 1:
                raise Unknown("a layer norm has no weight, or several dimensions")
            return fields.LAYER_NORM, bits(module.eps)
        self.replace(module, "RMSNorm")
        if hasattr(module, NORM):
            if not is_known(NORM, getattr(type(module), NORM)):
                raise Unknown(f"the code of {type(module).__name__} is not known")
            return fields.RMS_FROM_ONE, bits(module.eps)
        wide = "input_dtype" in type(module).forward.__code__.co_varnames and _weighs_wide(module)
        return (fields.RMS_WEIGHTED_WIDE if wide else fields.RMS), bits(module.variance_epsilon)


def check_shape(module: nn.Linear) -> None:
    """Check that a linear layer has a matrix, and no bias that torch would broadcast."""
    own = compat.parameters_of(module)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 2:
        raise Unknown("a linear layer has no matrix of its own")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise Unknown("a bias does not have a number for each output")


def _drops(module: Any) -> bool:
    """Return whether a module has an active dropout in training mode."""
    names = ("attention_dropout", "residual_dropout", "p")
    return any(getattr(module, name, 0.0) for name in names)


def _is_layer(kind: Any) -> bool:
    """Return whether a class has the call of transformers' checkpointing decoder layers."""
    return kind.__call__.__module__ == "transformers.modeling_layers"


def _weighs_wide(module: Any) -> bool:
    """Return whether a norm multiplies by its weight before it rounds."""
    with torch.no_grad():
        x = torch.linspace(-1.7, 1.9, len(module.weight), dtype=torch.bfloat16)[None]
        view = object.__new__(type(module))
        nn.Module.__init__(view)
        view.weight = nn.Parameter(torch.full_like(x[0], 1.0078125), requires_grad=False)
        view.variance_epsilon = module.variance_epsilon
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + view.variance_epsilon)
        wide = (view.weight * (x.float() * scale)).to(x.dtype)
        return torch.equal(type(module).forward(view, x), wide)


def piece_of(num_outputs: int) -> int:
    """Return the outputs of a linear layer that a thread computes at a time."""
    return PIECE if num_outputs <= LARGE else LARGE_PIECE

"""Answers every question of whether a model's own code may be replaced or captured.

Reasons against it are values of `execution`, which the statistics show.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lookahead_hf import kernels
from lookahead_hf.call import execution
from lookahead_hf.model import compat

_STOCK = [
    (own, name, getattr(own, name))
    for own, names in (
        (torch, ("cat", "rsqrt")),
        (functional, ("gelu", "layer_norm", "linear", "silu")),
        (nn.Linear, ("forward",)),
    )
    for name in names
]
"""Functions that layers call, as they are when this module is imported."""


def watcher() -> str | None:
    """Return why all modules and functions must be called as they are now, None if they need not.

    The mode of `torch.set_default_device` and of `with torch.device(...)` does not count: it only
    chooses where new tensors are made.
    """
    if any(compat.global_hooks()):
        return execution.HOOKS
    has_modes = compat.watches_functions() or compat.watches_operations()
    return execution.WATCHED if has_modes else None


def has_stock_functions() -> bool:
    """Return whether nobody has replaced the functions of torch that layers call."""
    return all(getattr(own, name) is each for own, name, each in _STOCK)


def is_hooked(module: nn.Module) -> bool:
    """Return whether hooks of a module do something now.

    transformers leaves some that only act where hidden states or attentions are collected.
    """
    return compat.is_hooked(module) or (compat.is_recording() and any(compat.hooks_of(module)))


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module and all modules in it run their classes' forwards."""
    return not any("forward" in vars(m) or compat.is_offloaded(m) for m in module.modules())


def blockers_of(module: nn.Module) -> Iterator[str]:
    """Yield the reasons why no graph may stand for a module's call."""
    if is_hooked(module):
        yield execution.HOOKS
    if compat.is_offloaded(module):
        yield execution.OFFLOADED
    if _is_replaced(module):
        yield execution.REPLACED


MOST_ITEMS = 1000
"""Items of a container up to which it is read; no forward looks at more of them in Python."""

_PLAIN = (int, str, bytes, complex, torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset)

_METHODS = {"generate", "generate_batch", "init_continuous_batching"}  # that `enable` replaces

_SKIPPED = frozenset({*vars(nn.Module()), *_METHODS, *compat.NOTES}) - {"training"}
"""Attributes that are read elsewhere, and attributes that no forward reads."""

_LAYOUT: tuple[Callable[[Any], Any], ...] = (
    attrgetter("__class__", "shape", "dtype", "is_cpu"),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)
"""What a tensor's memory holds."""

_PLACE: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.is_contiguous,
    torch.Tensor.data_ptr,
    torch.Tensor.is_neg,
    attrgetter("dtype"),
)
"""What tells in less time that the layout is the same, of tensors that are contiguous."""


class Watch:
    """Everything that kernels or a graph rely on of some modules, read in one walk over them.

    Neither runs any Python of the modules, so both may be used only while nothing has changed.
    `key` compares two moments between calls: plain numbers and strings by value, also in containers
    up to two levels deep, such as the scaling of adapters, and everything else by identity. Within
    a call, a streamer or another thread may still switch an adapter, hook a layer or replace a
    weight; `is_current` notices that in every step, in 0.3 ms for 400 modules.

    Attributes:
        modules: The modules.
        functions: What their classes call, by owner and name; many modules have the same.
        was_hooked: Whether a module had hooks.
        key: Equal at two moments that one graph serves. It keeps no part of the model alive.
    """

    def __init__(self, modules: Iterable[nn.Module], is_graph: bool = False) -> None:
        """Read modules.

        `is_graph`: a graph has baked in addresses and configurations, too; the weights stay in
        memory as long as the watch. Otherwise weights may move, and whatever is called in place of
        the first module does not count.
        """
        self.modules = list(modules)
        self.functions: dict[tuple[Any, str], Any] = {}
        self._found: list[Any] = []
        self._held: list[tuple[Any, Any, Any]] = []  # a mapping, a name and what it has by that
        self._dicts: list[dict[Any, Any]] = []
        self._sequences: list[tuple[Any, tuple[Any, ...]]] = []
        self._called = [] if is_graph else list(map(vars, self.modules[:1]))
        if is_graph:
            for own in compat.global_hooks():
                self._hold_all(own)
            for config in compat.configs_of(self.modules):
                self._read(vars(config), 3)
        for module in self.modules:
            self._read_module(module)
        self.was_hooked = any(any(compat.hooks_of(module)) for module in self.modules)
        self._kinds = list(map(type, self.modules))
        self._size = self._count()
        found = [each for module in self.modules for each in compat.tensors_of(module)]
        distinct = list({id(each): each for each in found}.values())
        self._tensors = [each for each in distinct if not hasattr(each, "__tensor_flatten__")]
        self._described, self._placed = self._read_all(_LAYOUT), self._read_all(_PLACE)
        baked = self._tensors if is_graph else []
        self._data = [(each, each.data_ptr(), each.untyped_storage()) for each in baked]
        self._attention = _attention_functions() if is_graph else ()
        self._found += map(_Same, self._attention)
        settings = _process_settings() if is_graph else ()
        self.key = (*settings, *self._found)
        self._found.clear()

    def _read_module(self, module: nn.Module) -> None:
        own, kind = vars(module), type(module)
        self._found.append(_Same(kind))
        if (kind, "forward") not in self.functions:
            names = [name for name, each in vars(kind).items() if isinstance(each, FunctionType)]
            of_kind = {name: getattr(kind, name) for name in ("forward", "__call__", *names)}
            self.functions |= {(kind, name): each for name, each in of_kind.items()}
            self._found += map(_Same, of_kind.values())
        for name in compat.HOLDERS:
            self._hold_all(own[name])
        for tensor in compat.tensors_of(module):
            self._found += addresses(tensor)
        is_called = any(own is each for each in self._called)
        skipped = {*_SKIPPED, compat.CALL} if is_called else _SKIPPED
        names = [name for name in own if name not in skipped]
        self.hold(own, names)
        self._dicts.append(own)
        for name in names:
            self._found.append(name)
            self._read(own[name], 2)

    def hold(self, mapping: dict[Any, Any], names: Iterable[Any]) -> None:
        """Remember the objects that a mapping has by these names."""
        self._held += [(mapping, name, mapping[name]) for name in names]

    def _hold_all(self, mapping: dict[Any, Any]) -> None:
        """Remember all that a mapping has, and that it has no more."""
        self.hold(mapping, mapping)
        self._dicts.append(mapping)

    def _read(self, value: Any, depth: int) -> None:
        """Add a value to the key; `depth`: levels of containers that are read."""
        found, kind = self._found, type(value)
        if isinstance(value, float):
            found += (kind, float(value).hex())  # 0.0 is not -0.0, and NaN is NaN
        elif value is None or isinstance(value, _PLAIN):
            found += (kind, value)
        elif isinstance(value, torch.Tensor):
            found += (_Same(value), *addresses(value))
        elif not depth or not isinstance(value, _CONTAINERS) or len(value) > MOST_ITEMS:
            found.append(_Same(value))
        elif isinstance(value, dict):
            found += (kind, len(value))
            self._hold_all(value)
            for name, item in tuple(value.items()):
                self._read(name, 0)
                self._read(item, depth - 1)
        else:
            found += (kind, len(value))
            self._sequences.append((value, tuple(value)))
            for item in tuple(value):
                self._read(item, depth - 1)

    @classmethod
    def joined(cls, watches: Sequence[Watch]) -> Watch:
        """Return a watch that is current while all of these are; its key is not theirs."""
        joint = cls([])
        lists = ("modules", "_held", "_dicts", "_sequences", "_called", "_kinds", "_tensors")
        for name in (*lists, "_data"):
            setattr(joint, name, [each for watch in watches for each in getattr(watch, name)])
        joint._size = sum(watch._size for watch in watches)
        described = (watch._described for watch in watches)
        columns = zip(joint._described, *described, strict=True)
        joint._described = [list(chain(*column)) for column in columns]
        joint._placed = []  # the first comparison takes the long way
        joint.was_hooked = any(watch.was_hooked for watch in watches)
        joint.functions = dict(chain(*(watch.functions.items() for watch in watches)))
        return joint

    @cached_property
    def _columns(self) -> tuple[Sequence[Any], ...]:
        """Mappings, names and values of all that is held."""
        return tuple(zip(*self._held, strict=True)) or ((), (), ())

    def _count(self) -> int:
        replaced = map(dict.__contains__, self._called, repeat(compat.CALL))
        return sum(map(len, filter(None, self._dicts))) - sum(replaced)

    def _read_all(self, attributes: Iterable[Callable[[Any], Any]]) -> list[list[Any]]:
        return [list(map(each, self._tensors)) for each in attributes]

    def _is_as_described(self) -> bool:
        """Return whether the memory of tensors, which may have moved, holds the same."""
        placed = self._read_all(_PLACE)
        is_same = placed == self._placed and all(placed[0])
        if not is_same and self._read_all(_LAYOUT) == self._described:
            self._placed, is_same = placed, True
        return is_same

    def is_hooked(self) -> bool:
        """Return whether hooks of a module do something now."""
        return any(map(is_hooked, self.modules))

    def refusal(self) -> str | None:
        """Return why the modules have to run their own code now, None if they need not."""
        is_current = self.are_modules_current()
        if (self.was_hooked or not is_current) and self.is_hooked():
            return execution.HOOKS
        return None if is_current else execution.CHANGED

    def is_current(self) -> bool:
        """Return whether nothing has changed."""
        return self.are_modules_current() and are_current(self.functions)

    def are_modules_current(self) -> bool:
        """Return whether the modules still hold the same objects, in the same memory."""
        mappings, names, values = self._columns
        return (
            all(map(is_, map(dict.get, mappings, names), values))
            and self._count() == self._size
            and list(map(type, self.modules)) == self._kinds
            and self._is_as_described()
            and all(tensor.data_ptr() == address for tensor, address, _ in self._data)
            and (not self._attention or all(map(is_, _attention_functions(), self._attention)))
            and all(
                len(now) == len(then) and all(map(is_, now, then)) for now, then in self._sequences
            )
        )


def are_current(functions: Mapping[tuple[Any, str], Any]) -> bool:
    """Return whether owners still have these functions by their names."""
    return all(getattr(*at, None) is function for at, function in functions.items())


def blockers(model: nn.Module, extras: Mapping[str, Any]) -> list[str]:
    """Return why steps are neither captured nor replayed, given the forward's `extras`."""
    found = {reason for module in model.modules() for reason in blockers_of(module)} | {watcher()}
    if any(isinstance(value, torch.Tensor) for value in extras.values()):
        found.add(execution.TENSORS)
    if compat.reads_lengths(model):
        found.add(execution.READS_LENGTHS)
    if compat.is_autocast():
        found.add(execution.AUTOCAST)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        found.add(execution.CAPTURED)
    order = vars(execution).values()
    return [reason for reason in order if isinstance(reason, str) and reason in found]


class _Same:
    """An object compared by identity, kept alive only if it has no weak references."""

    __slots__ = ("_kept",)

    def __init__(self, value: Any) -> None:
        try:
            self._kept = weakref.ref(value)  # one and the same as long as the object lives
        except TypeError:
            self._kept = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._kept is other._kept

    def __hash__(self) -> int:
        return id(self._kept)


def addresses(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return where the numbers of a tensor, or of the tensors that it wraps, are in memory."""
    if hasattr(tensor, "__tensor_flatten__"):  # quantised weights, for instance
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [address for each in inner for address in addresses(each)]
    return [(tensor.data_ptr(), tensor.is_neg(), tensor.dtype, tensor.shape, tensor.stride())]


def _process_settings() -> tuple[Any, ...]:
    """Return the settings of the process that decide which operations a forward runs."""
    cuda = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn  # stubs lack its parts
    # What torch.get_float32_matmul_precision returns follows from these, if it does not raise.
    with_tf32 = torch.backends, cuda.matmul, cudnn, cudnn.conv, cudnn.rnn
    return (
        *(each.fp32_precision for each in with_tf32),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        str(cuda.preferred_blas_library()),
        kernels.setting(),
    )


def _attention_functions() -> tuple[Any, ...]:
    """Return the functions that attention calls; a caller may replace them at any time."""
    registered = (compat.attention_function(name) for name in ("sdpa", "eager"))
    return (*registered, nn.functional.scaled_dot_product_attention)


def _is_replaced(module: nn.Module) -> bool:
    """Return whether a module object has a forward of its own that no graph may stand for.

    A graph may stand for what `torch.compile` wrapped, and for the fused kernels that Liger-Kernel
    and the kernels hub (`use_kernels=True`) put there: they know nothing but the module and their
    arguments. The key holds which forward it is.
    """
    own = vars(module).get("forward")
    if own is None or _is_fused(module, own):
        return False
    return not compat.is_compiled_wrapper(module)


def _is_fused(module: nn.Module, forward: Any) -> bool:
    """Return whether a forward is a kernel's function, bound to the module, without state."""
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    function: Any = forward.__func__
    is_liger = str(getattr(function, "__module__", "")).partition(".")[0] == "liger_kernel"
    is_for_kernels = hasattr(type(module), "kernel_layer_name")
    return (is_liger or is_for_kernels) and not getattr(function, "__closure__", None)

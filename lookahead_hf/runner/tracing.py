"""What a forward asks torch to do, noted call by call, so that it can be repeated as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# fmt: off
METADATA = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "get_device", "__len__", "is_floating_point", "is_complex", "is_contiguous", "is_inference",
    "is_tensor", "type", "is_grad_enabled", "is_autocast_enabled", "get_autocast_dtype",
    "get_default_dtype", "result_type", "can_cast", "promote_types", "is_same_size", "__hash__",
    "__eq__", "__ne__", "__format__", "__repr__", "__get__",
})
"""Functions whose plain Python results say nothing of a tensor's values."""

COPIES = frozenset({
    "to", "contiguous", "float", "half", "bfloat16", "double", "type", "type_as", "dropout",
})
"""Functions that return their argument where nothing is to be done, and then do nothing."""
# fmt: on


class Untraceable(Exception):
    """The forward does something that repeating its calls would not do."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that a call made or that is given anew each time."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """An object that stays the same: a weight, a module, a dtype."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and (self.value is other.value or self._equals(other))

    def __hash__(self) -> int:
        return id(self.value)

    def _equals(self, other: Const) -> bool:
        """Objects without identity of their own, as devices, dtypes and strings."""
        values = (self.value, other.value)
        return not any(isinstance(value, torch.Tensor) for value in values) and bool(
            type(self.value) is type(other.value) and self.value == other.value
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One call; tensors in its arguments and results are `Ref` or `Const`.

    Attributes:
        function: What was called, or the index of the cache's layer that took K and V.
        args: Its arguments, tuples, lists, dicts and slices of values.
        kwargs: Its keyword arguments.
        results: What it returned, tuples of `Ref` and None; None if it wrote into an argument.
    """

    function: Callable[..., Any] | int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any


@dataclass(frozen=True, slots=True)
class Trace:
    """A forward as a list of calls.

    Attributes:
        inputs: Names of what is given anew each time.
        operations: The calls.
        output: What the last of them led to.
    """

    inputs: tuple[str, ...]
    operations: list[Operation]
    output: Ref


class _Watch(TorchDispatchMode):
    """Refuses what can be seen below torch's API only, before it is done.

    The sizes of what `nonzero` finds are numbers like those of any tensor, but another time there
    are others. Numbers drawn for a trace would be missing where plain draws them, and what counts
    forwards in a buffer would count it.

    Attributes:
        is_watching: False while what is done is noted as a whole.
    """

    def __init__(self, constant: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.is_watching = True
        self._constant = {tensor.untyped_storage().data_ptr() for tensor in constant} - {0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_watching:
            if torch.Tag.dynamic_output_shape in func.tags and not _has_only_places(func, args):
                raise Untraceable(f"sizes depend on values: {func}")
            if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
                raise Untraceable(f"the forward draws random numbers: {func}")
        written = _tensors(_written(func, args, kwargs))
        if any(tensor.untyped_storage().data_ptr() in self._constant for tensor in written):
            raise Untraceable("the forward writes into the model's tensors")
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that an operation writes into."""
    given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    writes = (
        each for each in func._schema.arguments if each.alias_info and each.alias_info.is_write
    )
    return [given[each.name] for each in writes if each.name in given]


def _has_only_places(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is an indexing by places, which has as many results as there are places."""
    is_indexing = func is torch.ops.aten.index.Tensor
    return is_indexing and all(t.dtype not in (torch.bool, torch.uint8) for t in _tensors(args[1]))


class Tracer(TorchFunctionMode):
    """Notes every call of torch's API on this thread while it is entered.

    Some calls are noted as a whole, without what they call in turn: those made by `opaque`.
    """

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
        """`inputs`: what is given anew each time, tensors and the cache, by name."""
        super().__init__()
        self._inputs = tuple(inputs)
        constant = (*model.parameters(), *model.buffers())
        self._constant = {id(tensor) for tensor in constant}
        self._names = {id(value): Ref(name) for name, value in inputs.items()}
        self._alive: list[Any] = []  # an id is a name only as long as its object lives
        self._operations: list[Operation] = []
        self._watch = _Watch(constant)

    def __enter__(self) -> Tracer:
        super().__enter__()
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)
        super().__exit__(*error)

    def trace(self, output: torch.Tensor) -> Trace:
        """All that was noted, which led to `output`."""
        return Trace(self._inputs, self._operations, self._ref(output))

    def opaque(
        self, function: Callable[..., Any], called_as: Callable[..., Any] | int | None = None
    ) -> Callable[..., Any]:
        """A function that calls `function` and is noted as one call, of `called_as` if given."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._pausing():
                result = function(*args, **kwargs)
            self._note(function if called_as is None else called_as, args, kwargs, result)
            return result

        return call

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        before, self._watch.is_watching = self._watch.is_watching, False
        try:
            yield
        finally:
            self._watch.is_watching = before

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self._watch.is_watching:
            self._note_torch(function, args, kwargs, result)
        return result

    def _note_torch(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        name = getattr(function, "__name__", str(function))
        if result is not None and not _tensors(result):
            if name not in METADATA:
                raise Untraceable(f"the forward reads what {name} returns")
            return
        if result is None and not _tensors((args, kwargs)):
            return  # switches of the thread, such as grad mode
        if any(result is arg for arg in args) and name in COPIES:
            return
        self._note(function, args, kwargs, result)

    def _note(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._alive.append((args, kwargs, result))
        symbolic = self._symbolic(args), self._symbolic(kwargs)
        is_written = result is None or any(result is arg for arg in (*args, *kwargs.values()))
        results = None if is_written else self._results(result)
        self._operations.append(Operation(function, *symbolic, results))

    def _results(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A view that was taken before may be the same object.
            name = Ref(f"t{len(self._alive)}_{len(self._names)}")
            return self._names.setdefault(id(value), name)
        if isinstance(value, tuple | list):
            return tuple(map(self._results, value))
        return None

    def _symbolic(self, value: Any) -> Any:
        """A tree of arguments with `Ref` and `Const` for what is no number, text or container."""
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if isinstance(value, tuple | list):
            kind = list if isinstance(value, list) else tuple
            return kind(map(self._symbolic, value))
        if isinstance(value, dict):
            return {name: self._symbolic(item) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._symbolic, (value.start, value.stop, value.step)))
        if value is None or type(value) in (int, float, bool, str):
            return value
        return Const(value)

    def _ref(self, tensor: torch.Tensor) -> Any:
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        if id(tensor) not in self._constant:
            raise Untraceable("the forward uses a tensor that is neither the model's nor made here")
        return Const(tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

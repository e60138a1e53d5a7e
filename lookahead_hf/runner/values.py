"""What Python objects hold, as a flat list that another one is equal to if it says the same."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

MOST_ITEMS = 1000
"""Items of a container up to which it is read; no forward looks at more of them in Python."""

MOST_BYTES = 1 << 16
"""Bytes of an array up to which it is read."""

_EXACT = frozenset(
    {int, bool, str, bytes, complex, type(None), range, type(Ellipsis)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)
_NUMBERS_AND_TEXTS = (float, int, complex, str, bytes)


class Same:
    """Stands for an object that only its identity tells apart, and does not keep it alive."""

    __slots__ = ("_known",)

    def __init__(self, value: Any) -> None:
        try:
            self._known: Any = weakref.ref(value)  # one and the same as long as the object lives
        except TypeError:
            self._known = id(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        ours, theirs = self._known, other._known
        return ours is theirs or (type(ours) is int and type(theirs) is int and ours == theirs)

    __hash__ = None  # type: ignore[assignment]


class Values:
    """Reads objects into one flat list, each container and object once.

    Numbers and texts are read by value, and so are containers of them and what data classes,
    partial functions, closures and other objects hold. Of other objects in those, as of functions,
    only the identity is: nothing leads from a model to everything that its process holds. Tensors
    are known by identity, or by their shape alone.

    Attributes:
        found: What was read.
        dicts: Dicts in which it stands, those of objects' attributes among them.
        lists: Lists in which it stands.
    """

    def __init__(self, tensors: bool = True) -> None:
        """`tensors`: whether it matters which tensor stands somewhere."""
        self._tensors = tensors
        self.found: list[Any] = []
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[list[Any]] = []
        # By identity: of what was read with its inside, and of what was read without.
        self._places: tuple[dict[int, int], dict[int, int]] = {}, {}
        self._alive: list[Any] = []  # an id is a place only as long as its object lives

    def read(self, value: Any, inside: bool = True) -> None:
        """Read a value; `inside` says whether that goes for the inside of objects, too."""
        kind = type(value)
        if kind in _EXACT:
            self.found += (kind, value)
        elif kind is float:
            self.found += (kind, value.hex())  # 0.0 is not -0.0, and NaN is NaN
        elif (place := self._places[inside].get(id(value))) is not None:
            self.found.append(place)
        else:
            self._places[inside][id(value)] = len(self.found)
            self._alive.append(value)
            self._read_new(kind, value, inside)

    def items(self, items: Iterable[tuple[Any, Any]], inside: bool = True) -> None:
        """Read names and their values."""
        found = self.found
        for name, value in items:
            if type(name) is str:
                found.append(name)
            else:
                self.read(name, inside=False)
            kind = type(value)
            if kind in _EXACT:
                found += (kind, value)
            else:
                self.read(value, inside)

    def attributes(self, own: dict[Any, Any], inside: bool = True) -> None:
        """Read a dict, such as that of an object's attributes."""
        self.dicts.append(own)
        self.items(tuple(own.items()), inside)

    def _read_new(self, kind: type, value: Any, inside: bool) -> None:
        if isinstance(value, np.generic):
            self.found += (kind, value.tobytes())
        elif isinstance(value, np.ndarray):
            self._array(kind, value)
        elif isinstance(value, torch.Tensor):
            self.found += (kind, value.shape, value.dtype)
            if self._tensors:
                self.found += (Same(value), _address(value))
        elif isinstance(value, (*_SEQUENCES, *_SETS, dict)):
            self._container(kind, value, inside)
        elif isinstance(value, enum.Enum):
            self.found.append(Same(value))
        elif isinstance(value, _NUMBERS_AND_TEXTS):
            of = next(each for each in _NUMBERS_AND_TEXTS if isinstance(value, each))
            self.found += (kind, of.__repr__(value))
        else:
            self._object(kind, value, inside)

    def _array(self, kind: type, value: np.ndarray) -> None:
        is_small = value.nbytes <= MOST_BYTES and not value.dtype.hasobject
        held = value.tobytes() if is_small else Same(value)
        self.found += (kind, value.shape, value.dtype.str, held)

    def _container(self, kind: type, value: Any, inside: bool) -> None:
        self.found += (kind, len(value))
        if len(value) > MOST_ITEMS:
            self.found.append(Same(value))
        elif isinstance(value, dict):
            self.attributes(value, inside)
        elif isinstance(value, _SETS):
            are_exact = all(type(item) in _EXACT or type(item) is float for item in value)
            items = ((type(item), item) if are_exact else id(item) for item in value)
            self.found.append(frozenset(items))
        else:
            if isinstance(value, list):
                self.lists.append(value)
            for item in tuple(value):
                self.read(item, inside)

    def _object(self, kind: type, value: Any, inside: bool) -> None:
        if isinstance(value, types.MethodType):  # made anew whenever one is asked for
            self.found += (kind, Same(value.__self__), Same(value.__func__))
            return
        if not inside or isinstance(value, (type, types.ModuleType)):
            self.found.append(Same(value))
            return
        is_data = dataclasses.is_dataclass(value) or kind is types.SimpleNamespace
        self.found.append(Same(kind if is_data else value))
        if isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.read(part, inside=False)
        elif isinstance(value, types.FunctionType):
            for part in (value.__defaults__, value.__kwdefaults__, *_closure(value)):
                self.read(part, inside=False)
        else:
            own = getattr(value, "__dict__", None)
            if type(own) is dict:
                self.attributes(own, inside=is_data)
            for name, item in _in_slots(value):
                self.found.append(name)
                self.read(item, inside=is_data)


def _closure(function: types.FunctionType) -> Iterator[Any]:
    """What a function has from around its definition; a cell may be empty."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None


def _in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes that stand in slots."""
    for each in type(value).__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _address(tensor: torch.Tensor) -> int:
    """Where an ordinary tensor's numbers are; 0 for others."""
    is_ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor.data_ptr() if is_ordinary and tensor.device.type != "meta" else 0

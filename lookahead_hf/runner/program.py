"""A traced forward as one straight function, for blocks of any width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from lookahead_hf.runner.tracing import Const, Operation, Ref, Trace, Untraceable


@dataclass(frozen=True, slots=True)
class OfWidth:
    """A number that grows with the width of the block: `slope * width + offset`."""

    slope: int
    offset: int

    def at(self, width: int) -> int:
        """The number at this width."""
        return self.slope * width + self.offset


Linears = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Linear layers of one input whose weights and biases are fixed, [..., in] to [..., out] each."""

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""

LayerKey = tuple[int, int]
"""The ids of both: layers may share a weight and have each its own bias."""


Group = tuple[Layer, ...]
"""Layers that are given the same input."""


def key_of(group: Group) -> tuple[LayerKey, ...]:
    """What linear layers are known by as long as they live."""
    return tuple((id(weight), id(bias)) for weight, bias in group)


@dataclass(frozen=True, slots=True)
class Program:
    """Calls that do what a forward does, with its numbers for the width that it is given.

    Attributes:
        inputs: Names of what it is given, beside the width and the layers of the cache.
        run: `(width, layers, *inputs)` to logits, [rows, width, vocab].
    """

    inputs: tuple[str, ...]
    run: Callable[..., torch.Tensor]


def generalized(traces: Sequence[Trace], widths: Sequence[int]) -> Trace:
    """One trace for all widths, from those of two or more different ones.

    Raises:
        Untraceable: They differ in more than numbers that follow the width.
    """
    first, *others = traces
    if any(len(o.operations) != len(first.operations) or o.output != first.output for o in others):
        raise Untraceable("what the forward does depends on the number of tokens")
    each = zip(*(trace.operations for trace in traces), strict=True)
    return Trace(first.inputs, [_merged_operation(ops, widths) for ops in each], first.output)


def _merged_operation(operations: Sequence[Operation], widths: Sequence[int]) -> Operation:
    first, *others = operations
    if any(o.function != first.function or o.results != first.results for o in others):
        raise Untraceable("what the forward does depends on the number of tokens")
    return Operation(
        first.function,
        _merged([operation.args for operation in operations], widths),
        _merged([operation.kwargs for operation in operations], widths),
        first.results,
    )


def _merged(values: Sequence[Any], widths: Sequence[int]) -> Any:
    """What stands for these values, one of every width."""
    first, second, *_ = values
    if all(type(value) is type(first) for value in values):
        if isinstance(first, tuple | list) and len(set(map(len, values))) == 1:
            return type(first)(_merged(each, widths) for each in zip(*values, strict=True))
        if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
            return {name: _merged([value[name] for value in values], widths) for name in first}
        if isinstance(first, slice):
            ends = zip(*((value.start, value.stop, value.step) for value in values), strict=True)
            return slice(*(_merged(each, widths) for each in ends))
        if all(value == first for value in values):
            return first
        if type(first) is int:
            slope = (second - first) // (widths[1] - widths[0])
            number = OfWidth(slope, first - slope * widths[0])
            if list(values) == [number.at(width) for width in widths]:
                return number
    raise Untraceable(f"{', '.join(map(repr, values))} do not follow the number of tokens")


def compiled(trace: Trace, replaced: Mapping[Any, Linears] | None = None) -> Program:
    """Write a trace out as Python source and compile it.

    Args:
        trace: The calls.
        replaced: What stands for linear layers, by the keys of their groups.
    """
    writer = _Writer(replaced or {})
    lines = list(writer.lines(trace))
    names = ", ".join(f"i{n}" for n in range(len(trace.inputs)))
    body = "\n    ".join([*lines, f"return {writer.expression(trace.output)}"])
    source = f"def run(width, layers, {names}):\n    {body}\n"
    exec(compile(source, "<traced forward>", "exec"), writer.globals)
    return Program(trace.inputs, writer.globals["run"])


def groups_of(trace: Trace) -> list[Group]:
    """Every linear layer that is called with a fixed weight, with those of the same input."""
    groups = (tuple(map(_layer, operations)) for operations in _linears(trace))
    return list({key_of(group): group for group in groups}.values())


def _linears(trace: Trace) -> list[list[Operation]]:
    """Calls of such layers, those of the same input together where nothing is written in place."""
    found: dict[Any, list[Operation]] = {}
    writes = any(operation.results is None for operation in trace.operations)
    for index, operation in enumerate(trace.operations):
        if _is_fixed_linear(operation):
            weight, bias = _layer(operation)
            alone = writes or bias is not None or not isinstance(operation.args[0], Ref)
            key = index if alone else (operation.args[0].name, weight.dtype)
            found.setdefault(key, []).append(operation)
    return list(found.values())


def _layer(operation: Operation) -> Layer:
    weight, *bias = operation.args[1:]
    return weight.value, bias[0].value if bias and bias[0] is not None else None


def _is_fixed_linear(operation: Operation) -> bool:
    return (
        operation.function is linear
        and not operation.kwargs
        and len(operation.args) in (2, 3)
        and isinstance(operation.args[1], Const)
        and all(arg is None or isinstance(arg, Const) for arg in operation.args[2:])
    )


class _Writer:
    """Turns calls into lines of source; what has no literal is a global of the function."""

    def __init__(self, replaced: Mapping[Any, Linears]) -> None:
        self.globals: dict[str, Any] = {}
        self._replaced = replaced
        self._known: dict[int, str] = {}
        self._inputs: dict[str, str] = {}

    def lines(self, trace: Trace) -> Iterable[str]:
        """The calls, each value forgotten after its last use, as Python would."""
        self._inputs = {name: f"i{n}" for n, name in enumerate(trace.inputs)}
        last: dict[str, int] = {}
        for index, operation in enumerate(trace.operations):
            last |= dict.fromkeys(_refs((operation.args, operation.kwargs)), index)
            last |= dict.fromkeys(_refs(operation.results), index)
        for name in (*trace.inputs, trace.output.name):
            last.pop(name, None)
        over: dict[int, list[str]] = {}
        for name, index in last.items():
            over.setdefault(index, []).append(name)
        joined = self._joined(trace)
        for index, operation in enumerate(trace.operations):
            line = joined.get(id(operation))
            if line is None:
                target = "" if operation.results is None else f"{self.target(operation.results)} = "
                line = target + self._call(operation)
            if line:
                yield line
            if index in over:
                yield "del " + ", ".join(over[index])

    def _joined(self, trace: Trace) -> dict[int, str]:
        """Lines of replaced layers by the id of their calls; the first calls for all of a group."""
        lines: dict[int, str] = {}
        for whole in _linears(trace):
            for operations in (whole, *([each] for each in whole)):
                layers = self._replaced.get(key_of(tuple(map(_layer, operations))))
                if layers is not None and id(operations[0]) not in lines:
                    results = self.target(tuple(each.results for each in operations))
                    given = self.expression(operations[0].args[0])
                    lines |= {id(each): "" for each in operations}
                    lines[id(operations[0])] = f"{results} = {self._name(layers)}({given})"
        return lines

    def _call(self, operation: Operation) -> str:
        function, args, kwargs = operation.function, operation.args, operation.kwargs
        called = f"layers[{function}].update" if isinstance(function, int) else self._name(function)
        given = [*map(self.expression, args)]
        given += [f"{name}={self.expression(value)}" for name, value in kwargs.items()]
        return f"{called}({', '.join(given)})"

    def target(self, results: Any) -> str:
        """What a call's results are assigned to."""
        if isinstance(results, Ref):
            return results.name
        if results is None:
            return "_"
        return f"({', '.join(map(self.target, results))},)"

    def expression(self, value: Any) -> str:
        """Source of an argument."""
        if isinstance(value, Ref):
            return self._inputs.get(value.name, value.name)
        if isinstance(value, OfWidth):
            return f"{value.slope} * width + {value.offset}"
        if isinstance(value, list):
            return f"[{', '.join(map(self.expression, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self.expression(item)}, ' for item in value)})"
        if isinstance(value, dict):
            items = (f"{name!r}: {self.expression(item)}" for name, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            ends = map(self.expression, (value.start, value.stop, value.step))
            return f"slice({', '.join(ends)})"
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        return self._name(value.value if isinstance(value, Const) else value)

    def _name(self, value: Any) -> str:
        """The global that holds an object."""
        if id(value) not in self._known:
            self._known[id(value)] = f"c{len(self._known)}"
            self.globals[self._known[id(value)]] = value
        return self._known[id(value)]


def _refs(value: Any) -> Iterable[str]:
    """Names of all references in a tree."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, dict):
        yield from _refs(list(value.values()))
    elif isinstance(value, slice):
        yield from _refs([value.start, value.stop, value.step])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _refs(item)

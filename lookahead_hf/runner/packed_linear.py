"""Weights laid out for blocks of a few tokens, where that is faster and gives the same bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.nn.functional import linear

Linears = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Linear layers of one input, [..., in], to [..., out] each."""

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""

LayerKey = tuple[int, int]
"""The ids of both: layers may share a weight and have different biases."""

Group = tuple[Layer, ...]
"""Layers that are given the same input."""


def key_of(group: Group) -> tuple[LayerKey, ...]:
    """What linear layers are known by as long as they live."""
    return tuple((id(weight), id(bias)) for weight, bias in group)


MEMORY_SHARE = 0.25
"""Part of the free memory that packed weights may take where nobody asked for them."""

TRIED_TOKENS = (1, 2, 5, 17, 64, 256)
"""Tokens at which packed weights must give the bits of the weights as they are."""

TIMED_TOKENS, TIMED_ROUNDS = 5, 12
"""Tokens at which they must be faster, and how often that is looked at."""

GAIN = 1.0
"""Most that a packed layer may take of the time of one that is not."""

LAYOUT_TOKENS = 32
"""Tokens that the layout is chosen for; it serves any number."""

ROUNDING = 2e-6
"""Most by which packed weights may differ in float32, relative to the greatest result. There the
bits depend on the number of tokens in any case: blocks differ from single tokens by as much."""

PIECES = (127, 31, 7)
"""Words of a piece that a checksum adds up."""


class PackedWeights:
    """Packed copies of a model's weights, on the CPU; layers of one input in one piece.

    oneDNN lays weights out anew in every multiplication of a block: for 9 tokens of a model with
    135 million weights in bfloat16 that takes 10 of 27 ms on two cores.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        """Pack what gains by it, layers of one input as one; the first of every shape is tried."""
        self._weights: list[torch.Tensor] = []
        self.linears: dict[tuple[LayerKey, ...], Linears] = {}
        self._gains: dict[tuple[object, ...], bool] = {}
        for group in groups:
            for part in (group,) if self._is_worth(group) else zip(group):
                if self._is_worth(part):
                    self._weights += [weight for weight, _ in part]
                    self.linears[key_of(part)] = packed(part)
        self.same_bits = all(weight.dtype != torch.float32 for weight in self._weights)
        self._sums = self._summed()
        self._counted = [weight for weight in self._weights if not weight.is_inference()]
        self._versions = self._counts()

    def _is_worth(self, group: Group) -> bool:
        """Whether layers of such shapes gain by it together."""
        kind = tuple((tuple(weight.shape), weight.dtype, bias is None) for weight, bias in group)
        if kind not in self._gains:
            self._gains[kind] = _gains(group)
        return self._gains[kind]

    def is_written(self) -> bool:
        """Whether weights were written to since, other than through `.data`: for every step."""
        return self._counts() != self._versions

    def is_current(self) -> bool:
        """Whether the weights are still those that were packed, however they were written to."""
        return not self.is_written() and self._sums == self._summed()

    def _counts(self) -> list[int]:
        """How often each weight was written to, as torch counts; it leaves `.data` out."""
        return [weight._version for weight in self._counted]

    def _summed(self) -> list[int]:
        return [_checksum(weight) for weight in self._weights]


def _checksum(weight: torch.Tensor) -> int:
    """A hash of a weight's bits: of sums over pieces that are cut without regard to its rows.

    As a piece is a prime number of words, pieces end elsewhere in every row: rows or columns in
    another order are another weight. To read them takes longer than to add them up.
    """
    bits = weight.detach().contiguous().view(-1)
    words = bits.view(torch.int64 if bits.nbytes % 8 == 0 else torch.int16)
    rows = len(weight)
    size = next((n for n in PIECES if n <= rows and len(words) % (n * rows)), 1)
    whole = len(words) // size * size
    sums, rest = words[:whole].view(-1, size).sum(1), words[whole:]
    return hash((sums.numpy().tobytes(), rest.numpy().tobytes()))


def fits(groups: Iterable[Group]) -> bool:
    """Whether there is plenty of memory for a copy of these weights."""
    free = free_memory()
    total = sum(weight.nbytes for group in groups for weight, _ in group)
    return free is not None and total < MEMORY_SHARE * free


def free_memory() -> int | None:
    """Bytes that the process may still take; None where the system does not say (not Linux)."""
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024 * int(line.split()[1]))
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            limits.append(int(most) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(limits, default=None)


def packed(group: Group) -> Linears:
    """Linear layers of one input over a packed copy of their weights; several have no biases."""
    ops = torch.ops.mkldnn
    weights = [weight.detach() for weight, _ in group]
    whole = weights[0] if len(group) == 1 else torch.cat(weights)
    layout = ops._reorder_linear_weight(whole, LAYOUT_TOKENS)
    sizes = [len(weight) for weight in weights]
    return functools.partial(_multiplied, ops._linear_pointwise.default, layout, group[0][1], sizes)


def _multiplied(
    multiply: Callable[..., torch.Tensor],
    layout: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: list[int],
    x: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    out = multiply(x, layout, bias, "none", [], "")
    return (out,) if len(sizes) == 1 else out.split(sizes, -1)


def _gains(group: Group) -> bool:
    """Whether layers give the same bits packed, for all numbers of tokens, and faster."""
    weight = group[0][0]
    if not weight.is_floating_point() or not torch.backends.mkldnn.is_available():
        return False

    def own(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear(x, *layer) for layer in group)

    try:
        layers = packed(group)
        generator = torch.Generator().manual_seed(0)
        for tokens in TRIED_TOKENS:
            shape = 1, tokens, weight.shape[1]
            x = torch.randn(shape, generator=generator).to(weight.dtype)
            if not all(map(_agree, layers(x), own(x))):
                return False
    except (RuntimeError, AttributeError):  # this processor or build has no such layout
        return False
    return _is_faster(layers, own, weight)


def _agree(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether results are the same: bit for bit in half precision, up to rounding in float32."""
    if own.dtype != torch.float32:
        return torch.equal(ours, own)
    return bool((ours - own).abs().max() <= ROUNDING * own.abs().max())


def _is_faster(layers: Linears, own: Linears, weight: torch.Tensor) -> bool:
    """Whether layers take less time than others; in turns, so that what disturbs hits both."""
    x = torch.ones(1, TIMED_TOKENS, weight.shape[1], dtype=weight.dtype)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(TIMED_ROUNDS):
        for each, taken in zip((layers, own), times, strict=True):
            start = time.perf_counter()
            each(x)
            taken.append(time.perf_counter() - start)
    return min(times[0]) < GAIN * min(times[1])

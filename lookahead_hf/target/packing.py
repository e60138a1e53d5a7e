"""Weights laid out for blocks of a few tokens, where that is faster and gives the same bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.nn.functional import linear

from lookahead_hf.target.program import Layer, LayerKey, Linear, key_of

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


class PackedWeights:
    """Packed copies of a model's weights, on the CPU.

    oneDNN lays weights out anew in every multiplication of a block: for 9 tokens of a model with
    135 million weights in bfloat16 that takes 10 of 27 ms on two cores.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        """Pack what gains by it; the first layer of every shape is tried."""
        self._weights: list[torch.Tensor] = []
        self.same_bits = True
        self.linears: dict[LayerKey, Linear] = {}
        gains: dict[tuple[object, ...], bool] = {}
        for weight, bias in layers:
            kind = tuple(weight.shape), weight.dtype, bias is None
            if kind not in gains:
                gains[kind] = _gains(weight, bias)
            if gains[kind]:
                self.same_bits &= weight.dtype != torch.float32
                self._weights.append(weight)
                self.linears[key_of(weight, bias)] = packed(weight, bias)
        self._sums = self._summed()

    def is_current(self) -> bool:
        """Whether the weights are still those that were packed, however they were written to."""
        return self._sums == self._summed()

    def _summed(self) -> list[tuple[int, int]]:
        return [_checksum(weight) for weight in self._weights]


def _checksum(weight: torch.Tensor) -> tuple[int, int]:
    """How often a weight was written to, which `.data` leaves out, and a hash of its bits.

    The hash is one of the rows' sums, as the widest numbers that a row divides into: the same rows
    in another order are another weight.
    """
    bits = weight.detach()
    wide = bits.shape[1] * bits.element_size() % 8 == 0
    sums = bits.contiguous().view(torch.int64 if wide else torch.int16).sum(1)
    return 0 if weight.is_inference() else weight._version, hash(sums.numpy().tobytes())


def fits(layers: Iterable[Layer]) -> bool:
    """Whether there is plenty of memory for a copy of these weights."""
    free = free_memory()
    return free is not None and sum(weight.nbytes for weight, _ in layers) < MEMORY_SHARE * free


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


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A linear layer over a packed copy of its weight."""
    ops = torch.ops.mkldnn
    layout = ops._reorder_linear_weight(weight.detach(), LAYOUT_TOKENS)
    multiply = ops._linear_pointwise.default
    return functools.partial(_multiplied, multiply, layout, bias, [])


def _multiplied(
    multiply: Callable[..., torch.Tensor],
    layout: torch.Tensor,
    bias: torch.Tensor | None,
    none: list[float],
    x: torch.Tensor,
) -> torch.Tensor:
    return multiply(x, layout, bias, "none", none, "")


def _gains(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a weight gives the same bits packed, for all numbers of tokens, and faster."""
    if not weight.is_floating_point() or not torch.backends.mkldnn.is_available():
        return False
    try:
        layer = packed(weight, bias)
        generator = torch.Generator().manual_seed(0)
        for tokens in TRIED_TOKENS:
            shape = 1, tokens, weight.shape[1]
            x = torch.randn(shape, generator=generator).to(weight.dtype)
            if not _agree(layer(x), linear(x, weight, bias)):
                return False
    except (RuntimeError, AttributeError):  # this processor or build has no such layout
        return False
    return _is_faster(layer, lambda x: linear(x, weight, bias), weight)


def _agree(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether results are the same: bit for bit in half precision, up to rounding in float32."""
    if own.dtype != torch.float32:
        return torch.equal(ours, own)
    return bool((ours - own).abs().max() <= ROUNDING * own.abs().max())


def _is_faster(layer: Linear, own: Linear, weight: torch.Tensor) -> bool:
    """Whether a layer takes less time than another; in turns, so that what disturbs hits both."""
    x = torch.ones(1, TIMED_TOKENS, weight.shape[1], dtype=weight.dtype)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(TIMED_ROUNDS):
        for each, taken in zip((layer, own), times, strict=True):
            start = time.perf_counter()
            each(x)
            taken.append(time.perf_counter() - start)
    return min(times[0]) < GAIN * min(times[1])

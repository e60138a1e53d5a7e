"""Copies of weights in a layout for blocks of a few tokens, made where they are faster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import linear

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""

Group = tuple[Layer, ...]
"""Layers that read the same input; several have no biases."""

Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes an input [..., in] and the bias, and returns the outputs of all layers, [..., all out]."""

MEMORY_SHARE = 0.25
"""Share of the free memory that the copies may take unless the user asks for them."""

TRIED_TOKENS = (1, 17, 65, 128, 256)
"""Numbers of tokens for which a copy is compared with the weight itself. In half precision it
serves no more tokens than those up to which the bits are the same: in a joined product of three
layers they differ from 192 tokens on. In float32 results agree up to rounding anyway."""

TRIED_RESULTS, MOST_TRIALS = 50_000, 16
"""Results to compare for a number of tokens, and blocks that may be multiplied for them. Another
order of additions changes few results: of a layer with 128 outputs, one block may show none."""

MOST_TRIED = 2e9
"""Largest product of tokens and elements of a weight that is tried beyond `FEWEST_SERVED` tokens:
256 tokens of an output layer would take as long as five steps."""

FEWEST_SERVED = 65
"""Tokens that a copy must serve: a step of one row has at most so many by default."""

FEW_TOKENS = 3
"""Up to so many tokens, MKL reads a weight in float32 as it is about as fast as memory is: there a
copy does not serve (110 us for the joined projections of SmolLM2's attention, its own 98)."""

TIMED_TOKENS, TIMED_ROUNDS = 5, 6
"""Tokens of a block that is timed, and how often it is. The first round makes kernels, and others
may meet a garbage collection."""

GAIN = 1.1
"""Largest share of the layers' own time that a copy may take. On a busy machine both seem to take
the same, and a copy that is refused by mistake is missing for as long as the model lives."""

MOST_CHECKING = 4.0
"""Largest time of a checksum, relative to a multiplication by the weight. It is 0.4 on a processor
with instructions for int8. Where it is much longer, checks cost a call more than copies save."""

LAYOUT_TOKENS = 32
"""Number of tokens that oneDNN chooses the layout for; the copy serves any number."""

ROUNDING = 1e-7
"""Largest difference of float32 results, relative to the largest result, per root of the number of
terms that were added up. In float32 the bits depend on the number of tokens anyway: a block differs
from single tokens by as much."""


def pack(group: Group) -> Multiply:
    """Copy the weights of one or several layers into one packed layout.

    Raises:
        RuntimeError: This processor or build of torch has no such layout, or memory runs out.
    """
    ops = torch.ops.mkldnn
    weights = [weight.detach() for weight, _ in group]
    whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    layout = ops._reorder_linear_weight(whole, LAYOUT_TOKENS)
    # Without the overload's Python wrapper, which takes half a microsecond.
    run = ops._linear_pointwise.default._op

    def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = run(x, layout, bias, "none", [], "")
        return out

    return multiply


def served_tokens(group: Group) -> range:
    """Pack layers on trial; return the numbers of tokens for which copies give the same, faster."""
    weight, bias = group[0]
    if not weight.is_floating_point() or not torch.backends.mkldnn.is_available():
        return range(0)

    def own(x: torch.Tensor) -> list[torch.Tensor]:
        return [linear(x, *layer) for layer in group]

    try:
        multiply = pack(group)
        most = _most_alike(multiply, own, group)
    except (RuntimeError, AttributeError):  # this processor or build has no such layout
        return range(0)

    def packed(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, bias)

    if most < FEWEST_SERVED or time_share(packed, own, weight, TIMED_TOKENS) >= GAIN:
        return range(0)
    if weight.dtype != torch.float32:
        return range(1, most + 1)
    return range(FEW_TOKENS + 1, sys.maxsize if most == TRIED_TOKENS[-1] else most + 1)


def _most_alike(
    multiply: Multiply, own: Callable[[torch.Tensor], list[torch.Tensor]], group: Group
) -> int:
    """Return the most tokens of those tried up to which a copy gives the same results."""
    weight, bias = group[0]
    tried = [n for n in TRIED_TOKENS if n <= FEWEST_SERVED or n * weight.numel() <= MOST_TRIED]
    generator, num_outputs = torch.Generator().manual_seed(0), sum(len(each) for each, _ in group)
    most = 0
    for tokens in tried:
        for _ in range(min(MOST_TRIALS, -(-TRIED_RESULTS // (tokens * num_outputs)))):
            x = torch.randn(1, tokens, weight.shape[1], generator=generator).to(weight.dtype)
            parts = own(x)
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            if not _agree(multiply(x, bias), whole, weight.shape[1]):
                return most
        most = tokens
    return most


def _agree(packed: torch.Tensor, own: torch.Tensor, num_terms: int) -> bool:
    """Whether results are the same: bit for bit in half precision, up to rounding in float32."""
    if own.dtype != torch.float32:
        return torch.equal(packed, own)
    return bool((packed - own).abs().max() <= ROUNDING * num_terms**0.5 * own.abs().max())


def time_share(
    packed: Callable[[torch.Tensor], object],
    own: Callable[[torch.Tensor], object],
    weight: torch.Tensor,
    num_tokens: int,
) -> float:
    """Return the time of packed layers as a share of the layers' own time.

    Both are timed in turns, so that a disturbance hits both.
    """
    x = torch.ones(1, num_tokens, weight.shape[1], dtype=weight.dtype)
    fastest = [float("inf")] * 2
    for _ in range(TIMED_ROUNDS):
        for at, run in enumerate((packed, own)):
            start = time.perf_counter()
            run(x)
            fastest[at] = min(fastest[at], time.perf_counter() - start)
    return fastest[0] / fastest[1]


def checksum(weight: torch.Tensor) -> torch.Tensor:
    """Return sums that tell edits of a weight, [out, 4] int32.

    They are the product of its bytes and some factors, in integers, where no edit is lost in
    rounding. To compute it takes hardly longer than to read the weight.
    """
    content = weight.detach().contiguous().view(torch.int8)
    return torch._int_mm(content, _factors(content.shape[1]))


@cache
def _factors(num_bytes: int) -> torch.Tensor:
    """Return what the bytes of a weight's row are multiplied by, [bytes, 4] int8.

    They are random, so that hardly any edit leaves all four sums of every row as they are. Factors
    below 64 suit older processors, which add up pairs of products in 16 bits.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-63, 64, (num_bytes, 4), generator=generator, dtype=torch.int8)


def checks_are_fast(weight: torch.Tensor) -> bool:
    """Whether checksums take little time on this processor."""

    def own(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight)

    return time_share(lambda _: checksum(weight), own, weight, TIMED_TOKENS) < MOST_CHECKING


def fits(groups: Iterable[Group]) -> bool:
    """Whether there is plenty of memory for a copy of these weights."""
    free = free_memory()
    total = sum(weight.nbytes for group in groups for weight, _ in group)
    return free is not None and total < MEMORY_SHARE * free


def free_memory() -> int | None:
    """Return the bytes that this process may still take; None where the system does not tell."""
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

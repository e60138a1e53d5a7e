"""What several kernels share: an order for scores, packed (score, index) keys, a first launch."""

# The bodies are Triton's language, in which pointers and blocks carry no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**31))
"""Below the key of every score, minus infinity included: masked lanes carry it and never win."""

LOWEST_PACKED = tl.constexpr(-(2**63))
"""The same for packed keys."""


@triton.jit
def order_key(score):
    """int32 in the order of `torch.argmax`: every NaN equal and on top, -0.0 equal to 0.0."""
    score = score.to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def finite(score):
    """A finite score to subtract from others: infinity minus itself is NaN."""
    return tl.where(score != score, 1.0e38, tl.minimum(tl.maximum(score, -1.0e38), 1.0e38))


@triton.jit
def pack(key, index):
    """int64 that is greatest for the greatest key and, among equal keys, for the lowest index."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def packed_index(packed):
    """The index in a packed key."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def packed_score(packed):
    """The score in a packed key, float32."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(key, index):
    """Packed key of the greatest entry of a block, the lowest index among equals."""
    greatest = tl.max(key, axis=0)
    first = tl.min(tl.where(key == greatest, index, 0x7FFFFFFF), axis=0)
    return pack(greatest, first)


def places(width: int) -> int:
    """Places for the nodes of a row in a program, the same for most widths.

    A kernel per width would save next to nothing and have to be compiled.
    """
    return 1 if width == 1 else max(64, triton.next_power_of_2(width))


@triton.jit
def _trial_kernel(out_ptr):
    tl.store(out_ptr, 1)


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, **arguments: Any) -> None:
    """Launch a kernel on the device of a tensor."""
    # Triton 3.9 warns without `enable_fp_fusion`, and 3.10 has the other default.
    with torch.cuda.device(on.device) if on.is_cuda else nullcontext():
        kernel[grid](**arguments, enable_fp_fusion=True)


def try_launch(device: torch.device) -> None:
    """Launch a kernel that needs next to nothing; it raises what any launch would."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    launch(_trial_kernel, (1,), out, out_ptr=out, num_warps=1)

"""The first launch on a device, which shows whether Triton runs there."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._launch import launch as launch_on


@triton.jit
def _trial_kernel(out_ptr):
    tl.store(out_ptr, 1)


def launch(device: torch.device) -> None:
    """Launch a kernel that needs next to nothing."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    launch_on(_trial_kernel, (1,), out, out_ptr=out, num_warps=1)

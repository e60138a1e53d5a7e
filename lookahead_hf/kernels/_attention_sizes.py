"""How many queries, keys, splits and stages a launch of the attention kernels takes."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

LEAST_KEYS = 128
"""Fewest keys that a program reads."""


def tile_sizes(queries: int, dim: int, dtype: torch.dtype, is_rdna: bool = False) -> dict[str, int]:
    """Queries, keys and warps per tile, as many as fit into registers for up to 256 dimensions.

    float32 is multiplied without tensor cores and takes a register per operand. RDNA holds the
    operands of a product twice.
    """
    keys = 16 if dtype == torch.float32 else 32 if dim > 128 else 64
    if is_rdna:
        keys = max(16, keys // 2)
    return {
        "WARPS": 8 if is_rdna else 4,
        "QUERIES": min(keys, max(16, triton.next_power_of_2(queries))),
        "KEYS": keys,
    }


def keys_per_split(slots: int, programs: int, device: torch.device) -> int:
    """Keys of one program: two programs per processor where the cache is long enough.

    It depends on the capacity and not on the lengths, so that no bit changes in mid-text.
    """
    splits = max(1, min(64, 2 * _processors(device) // programs))
    return max(LEAST_KEYS, triton.cdiv(triton.cdiv(slots, splits), 64) * 64)


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 128
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def is_rdna(device: torch.device) -> bool:
    """Return whether a device is an AMD GPU with 32 lanes in a warp: all but data-centre ones."""
    if device.type != "cuda" or not torch.version.hip:
        return False
    return int(torch.cuda.get_device_properties(device).warp_size) == 32


@lru_cache
def num_stages(device: torch.device, dim: int) -> int:
    """Tiles in flight on a device; see `stages`."""
    if device.type != "cuda" or torch.version.hip:
        return stages(dim, 0)
    return stages(dim, torch.cuda.get_device_capability(device)[0])


def stages(dim: int, major: int) -> int:
    """Three tiles in flight where they fit: up to 128 dimensions, on GPUs with 227 KB per program.

    Those are of compute capability 9.0 and 10.x; 12.x has 99 KB. `major` is 0 for AMD.
    """
    return 3 if dim <= 128 and major in (9, 10) else 2

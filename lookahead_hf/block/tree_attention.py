"""Attention of a step in our kernel over cache slots, where that is faster."""

from __future__ import annotations

from functools import lru_cache

import torch

from lookahead_hf import kernels
from lookahead_hf.block.block import Block, Held

_LEAST_SLOTS = 512
"""Below this many slots, splitting the keys over programs does not pay."""

_MANY_SLOTS = 1024
"""From this many slots on the kernel serves any number of rows: it reads what each row holds, while
torch reads all slots of every row, and the mask."""

_ROWS_PER_PROGRAM = 64
"""Query rows of one program of torch's memory-efficient attention."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def serves(device: torch.device, width: int) -> bool:
    """Return whether the kernel may attend blocks of this width on this device."""
    return kernels.backend(device) == "triton" and width <= kernels.MAX_ATTENTION_NODES


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel takes heads of this size and dtype."""
    if max(query.shape[3], value.shape[3]) > kernels.MAX_HEAD_DIM or query.dtype not in _DTYPES:
        return False
    # Triton's interpreter multiplies the bit patterns of bfloat16.
    return query.device.type != "cpu" or query.dtype != torch.bfloat16


def is_faster(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel attends faster than torch.

    Torch's attention under a mask reads all keys of 64 query rows in one program. If that leaves
    processors of the GPU idle, the kernel is faster, because it splits the keys. With many slots it
    is, too, because it reads only what each row holds. Shapes alone decide, so that a text has the
    same bits whatever else the machine does. If LOOKAHEAD_HF_BACKEND asks for Triton, the kernel
    always serves.

    Args:
        query: [rows, heads, width, dim].
        key: [rows, kv_heads, slots, dim].
        value: [rows, kv_heads, slots, v_dim].
    """
    if not can_attend(query, key, value):
        return False
    if kernels.is_asked_for():
        return True
    rows, heads, width, _ = query.shape
    kv_heads, slots, _ = value.shape[1:]
    folded = heads // kv_heads * width
    programs = rows * kv_heads * -(-folded // _ROWS_PER_PROGRAM)
    if slots >= _MANY_SLOTS:
        return True
    return slots >= _LEAST_SLOTS and programs < _processors(query.device)


@lru_cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def attend(
    block: Block,
    held: Held,
    query: torch.Tensor,  # [rows, heads, width, dim]
    key: torch.Tensor,  # [rows, kv_heads, slots, dim]
    value: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:  # [rows, width, heads, v_dim]
    """Attend as under the block's mask, without reading it, in layers that hold `held`."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    window = held.kind.window or 0
    return kernels.tree_attention(
        q,
        k,
        v,
        held.lengths,
        block.words,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        window=window,
        columns=held.columns if window else None,
        pads=held.offsets,
        softcap=softcap or 0.0,
        sinks=sinks,
        by_length=block.by_length,
    )

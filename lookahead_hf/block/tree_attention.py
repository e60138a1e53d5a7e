"""Attention of a step in our kernel over cache slots, where that is faster."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from lookahead_hf import kernels

_LEAST_SLOTS = 512
"""Below this many slots, splitting the keys over programs does not pay."""

_MANY_SLOTS = 1024
"""From this many slots on the kernel serves any number of rows: it reads what each row holds, while
torch reads all slots of every row, and the mask."""

_ROWS_PER_PROGRAM = 64
"""Query rows of one program of torch's memory-efficient attention."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTree:
    """A step's attention mask in the kernel's format.

    Attributes:
        mask: The mask as layers get it, [rows, 1, width, slots].
        lengths: Slots of each row before its block, [rows] int64.
        ancestors: A word per block token, [rows, width]; bit j is set if the token sees token j of
            the block.
        window: Columns that a token sees, its own included; 0 for all.
        columns: Column of the token in every slot, needed with a window, [rows, any] int64.
        pads: Column minus slot of later tokens, [rows] int64.
        by_length: Whether programs divide a row's tokens, not its slots. This is faster, but the
            bits of a token then depend on the length of the row.
    """

    mask: torch.Tensor
    lengths: torch.Tensor
    ancestors: torch.Tensor
    window: int = 0
    columns: torch.Tensor | None = None
    pads: torch.Tensor | None = None
    by_length: bool = field(default=False, kw_only=True)


def ancestor_words(seen: np.ndarray) -> np.ndarray:
    """Pack who sees whom, [rows, width, width], into words per block token, [rows, width] int64."""
    words = np.zeros((*seen.shape[:2], 8), np.uint8)
    packed = np.packbits(seen, axis=2, bitorder="little")
    words[:, :, : packed.shape[2]] = packed
    return words.view("<i8")[:, :, 0]


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
    tree: BlockTree,
    query: torch.Tensor,  # [rows, heads, width, dim]
    key: torch.Tensor,  # [rows, kv_heads, slots, dim]
    value: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:  # [rows, width, heads, v_dim]
    """Attend as under `tree.mask`, without reading the mask."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    return kernels.tree_attention(
        q,
        k,
        v,
        tree.lengths,
        tree.ancestors,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        window=tree.window,
        columns=tree.columns,
        pads=tree.pads,
        softcap=softcap or 0.0,
        sinks=sinks,
        by_length=tree.by_length,
    )

"""Compaction: keep one path of every row's draft tree, in all layers, in one launch.

    for tensor, row:
        for i in range(num_kept[row]):
            tensor[row, lengths[row] + i] = tensor[row, lengths[row] + path[row, i]]

Tensors are [batch, slot, ...] with one token's values in one piece; a `PathTable` holds addresses.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._common import launch, places
from lookahead_hf.kernels.data import PathTable

_WORD = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
_BLOCK = 128


@triton.jit(do_not_specialize=["path_stride", "path_width"])
def _compact_path_kernel(
    table_ptr,  # [tensors, 4]: address, row stride, slot stride, width
    lengths_ptr,  # [rows]
    path_ptr,  # [rows, path_width]
    num_kept_ptr,  # [rows]
    path_stride,
    path_width,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layout = table_ptr + tl.program_id(0) * 4
    row = tl.program_id(1).to(tl.int64)
    stride_row = tl.load(layout + 1)
    stride_slot = tl.load(layout + 2)
    width = tl.load(layout + 3)
    target = tl.arange(0, PATH)
    kept = (target < tl.load(num_kept_ptr + row)) & (target < path_width)
    source = tl.load(path_ptr + row * path_stride + target, mask=kept, other=0).to(tl.int64)
    moves = kept & (source != target)

    slot = tl.load(lengths_ptr + row).to(tl.int64)
    first = tl.load(layout).to(tl.pointer_type(WORD)) + row * stride_row + slot * stride_slot
    if ALIGNED:
        # Loaded addresses have no known alignment, and without it every move is one word. The hint
        # counts on the pointer; on the integer before the cast it is lost.
        stride_slot = tl.multiple_of(stride_slot, 4)
        width = tl.multiple_of(width, 4)
        first = tl.multiple_of(first, 16)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = moves[:, None] & (word < width)[None, :]
    values = tl.load(first + source[:, None] * stride_slot + word[None, :], mask=mask)
    # Where one token goes another one came from: all loads before any store.
    tl.debug_barrier()
    tl.store(first + target[:, None] * stride_slot + word[None, :], values, mask=mask)


def compact_path(
    table: PathTable,
    lengths: torch.Tensor,  # [rows]
    path: torch.Tensor,  # [rows, any]
    num_kept: torch.Tensor,  # [rows]
) -> None:
    """See `dispatch.compact_path`; the tensors share one device."""
    assert len(table.by_device) == 1, "one launch serves one device"
    path = path if path.stride(1) == 1 else path.contiguous()
    launch(
        _compact_path_kernel,
        (len(table.tensors), len(path), triton.cdiv(table.max_words, _BLOCK)),
        lengths,
        table_ptr=table.words,
        lengths_ptr=lengths.contiguous(),
        path_ptr=path,
        num_kept_ptr=num_kept.contiguous(),
        path_stride=path.stride(0),
        path_width=path.shape[1],
        WORD=_WORD[table.word_bytes],
        ALIGNED=table.aligned,
        PATH=places(path.shape[1]),
        BLOCK=_BLOCK,
        num_warps=4,
    )

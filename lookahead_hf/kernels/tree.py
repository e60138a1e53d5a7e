"""Draft trees: verification, rejection sampling, and keeping the accepted path in the cache.

Nodes are [rows, 1 + nodes] with node 0 the row's last token. Verification finds the best token of
every node, in a pass over the vocabulary (`tile_best`); one program per row then walks:

    for row:
        best = [argmax(score[node]) for node in range(1 + num_nodes[row])]
        path = [0]
        for node in range(1, 1 + num_nodes[row]):
            if parents[row, node] == path[-1] and tokens[row, node] == best[path[-1]]:
                path.append(node)
        num_accepted, bonus = len(path) - 1, best[path[-1]]

Rejection sampling, written out in `reference.reject_tree`, walks nodes that were drawn from known
distributions. The rule for one draft token is that of Leviathan et al. (arXiv:2211.17192); to try
siblings one after the other on what the rejected ones left over is multi-step speculative sampling
(SpecInfer, arXiv:2305.09781). A child's distribution is the one it was drawn from, its earlier
siblings given: draws with and without replacement both come out right.

Compaction moves the tokens of the path together, in all layers in one launch: for each tensor, row
and `i < num_kept[row]`, from slot `lengths[row] + path[row, i]` to slot `lengths[row] + i`.
Tensors are [batch, slot, ...] with one token's values in one piece; a `PathTable` holds addresses.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead_hf.kernels._common import (
    LOWEST_KEY,
    LOWEST_PACKED,
    best_of,
    launch,
    order_key,
    packed_index,
    places,
    tile_best,
)
from lookahead_hf.kernels.data import PathTable, TreeWalk


@triton.jit(do_not_specialize=["width", "tiles"])
def _walk_kernel(
    packed_ptr,  # [rows, 2 + width]
    best_ptr,  # [rows, width]
    tiles_ptr,  # [rows, width, tiles]
    tokens_ptr,  # [rows, width]
    parents_ptr,  # [rows, width]
    num_nodes_ptr,  # [rows]
    width,
    tiles,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    tile = tl.arange(0, TILES)
    entry = row * width + node
    live = node <= tl.load(num_nodes_ptr + row)
    packed = tl.load(
        tiles_ptr + entry[:, None] * tiles + tile[None, :],
        mask=live[:, None] & (tile < tiles)[None, :],
        other=LOWEST_PACKED,
    )
    best = tl.where(live, packed_index(tl.max(packed, axis=1)), -1)
    tl.store(best_ptr + entry, best, mask=node < width)

    token = tl.load(tokens_ptr + entry, mask=live, other=0)
    parent = tl.load(parents_ptr + entry, mask=live, other=-1)
    path = tl.where(node == 0, 0, -1)
    at = tl.min(node, axis=0)
    accepted = at
    wanted = tl.max(tl.where(node == at, best, -1), axis=0)
    walking = accepted == 0
    while walking:
        # Children come after their parents, so the walk ends whatever the padding holds.
        fits = live & (node > at) & (parent == at) & (token == wanted)
        child = tl.min(tl.where(fits, node, NODES), axis=0)
        walking = child < NODES
        at = tl.where(walking, child, at)
        accepted += walking.to(tl.int32)
        path = tl.where(node == accepted, at, path)
        wanted = tl.max(tl.where(node == at, best, -1), axis=0)
    out = packed_ptr + row * (2 + width)
    tl.store(out, accepted)
    tl.store(out + 1, wanted)
    tl.store(out + 2 + node, path, mask=node < width)


def verify_tree(
    scores: torch.Tensor,  # [rows, 1 + nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    depth: torch.Tensor | None = None,  # [rows, 1 + nodes]
    keep_scan: bool = False,
) -> TreeWalk:
    """See `reference.verify_tree`."""
    rows, width, _ = scores.shape
    scan = tile_best(scores, num_nodes, noise, depth, parts=keep_scan)
    best = torch.empty(rows, width, dtype=torch.int64, device=scores.device)
    packed = torch.empty(rows, 2 + width, dtype=torch.int64, device=scores.device)
    launch(
        _walk_kernel,
        (rows,),
        scores,
        packed_ptr=packed,
        best_ptr=best,
        tiles_ptr=scan.best,
        tokens_ptr=tokens.contiguous(),
        parents_ptr=parents.contiguous(),
        num_nodes_ptr=num_nodes.contiguous(),
        width=width,
        tiles=scan.best.shape[2],
        NODES=places(width),
        TILES=triton.next_power_of_2(scan.best.shape[2]),
        num_warps=8,
    )
    return TreeWalk(packed, best, scan if keep_scan else None)


_BLOCK = 4096


@triton.jit
def _reject_sibling(left, draft, rest, scale, vocab, BLOCK: tl.constexpr):
    """Write `max(left / scale - draft, 0)` to `rest`, which may be `left`; return its sum."""
    lane = tl.arange(0, BLOCK)
    total = tl.full([], 0.0, tl.float32)
    # Every thread reads the probability of one token before and after, but not while others write.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        inside = start + lane < vocab
        of_target = tl.load(left + start + lane, mask=inside, other=0.0)
        of_draft = tl.load(draft + start + lane, mask=inside, other=0.0)
        over = tl.maximum(tl.div_rn(of_target, scale) - of_draft, 0.0)
        tl.store(rest + start + lane, over, mask=inside)
        total += tl.sum(over, axis=0)
    tl.debug_barrier()
    return total


@triton.jit
def _draw(left, noise, vocab, BLOCK: tl.constexpr):
    """Token with the greatest `left / noise`."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([], LOWEST_PACKED, tl.int64)
    for start in range(0, vocab, BLOCK):
        index = start + lane
        inside = index < vocab
        chance = tl.load(left + index, mask=inside, other=0.0)
        score = tl.div_rn(chance, tl.load(noise + index, mask=inside, other=1.0))
        best = tl.maximum(best, best_of(tl.where(inside, order_key(score), LOWEST_KEY), index))
    return packed_index(best)


@triton.jit
def _either(first, second, is_first, ALIGNED: tl.constexpr):
    """One of two float32 pointers; for AMD, Triton 3.6 chooses between numbers only."""
    address = tl.where(is_first, first.to(tl.int64), second.to(tl.int64))
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGNED)


@triton.jit(do_not_specialize=["width"])
def _reject_kernel(
    packed_ptr,  # [rows, 2 + width]
    left_ptr,  # [rows, vocab]
    probs_ptr,  # [rows, width, vocab]
    draft_ptr,  # [rows, width - 1, vocab]
    tokens_ptr,  # [rows, width]
    parents_ptr,  # [rows, width]
    num_nodes_ptr,  # [rows]
    uniforms_ptr,  # [rows, width - 1]
    noise_ptr,  # [rows, vocab]
    probs_stride_row,
    probs_stride_node,
    draft_stride_row,
    draft_stride_node,
    vocab,
    width,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = probs_ptr + row * probs_stride_row
    rest = left_ptr + row * vocab
    nodes = tl.arange(0, NODES)
    path = tl.where(nodes == 0, 0, -1)
    accepted = tl.min(nodes, axis=0)
    at = row * 0
    rejected = at - 1  # the latest node with a rejected child; what that has left is in `rest`
    total = tl.full([], 1.0, tl.float32)
    node = at + 1
    while node <= tl.load(num_nodes_ptr + row):
        if tl.load(parents_ptr + row * width + node) == at:
            token = tl.load(tokens_ptr + row * width + node)
            draft = draft_ptr + row * draft_stride_row + (node - 1) * draft_stride_node
            uniform = tl.load(uniforms_ptr + row * (width - 1) + node - 1)
            left = _either(rest, target + at * probs_stride_node, rejected == at, ALIGNED)
            if uniform * tl.load(draft + token) * total < tl.load(left + token):
                accepted += 1
                path = tl.where(nodes == accepted, node.to(tl.int32), path)
                at = node
                total = tl.full([], 1.0, tl.float32)
            else:
                scale = tl.where(total > 0, total, 1.0)
                total = _reject_sibling(left, draft, rest, scale, vocab, BLOCK)
                rejected = at
        node += 1
    # Only rounding can leave nothing; then the target's own distribution is drawn from.
    has_rest = (rejected == at) & (total > 0)
    left = _either(rest, target + at * probs_stride_node, has_rest, ALIGNED)
    out = packed_ptr + row * (2 + width)
    tl.store(out, accepted)
    tl.store(out + 1, _draw(left, noise_ptr + row * vocab, vocab, BLOCK))
    tl.store(out + 2 + nodes, path, mask=nodes < width)


def reject_tree(
    probs: torch.Tensor,  # [rows, 1 + nodes, vocab]
    draft_probs: torch.Tensor,  # [rows, nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    uniforms: torch.Tensor,  # [rows, nodes]
    noise: torch.Tensor,  # [rows, vocab]
) -> TreeWalk:
    """See `reference.reject_tree`."""
    rows, width, vocab = probs.shape
    probs = probs if probs.stride(2) == 1 else probs.contiguous()
    draft_probs = draft_probs if draft_probs.stride(2) == 1 else draft_probs.contiguous()
    left = torch.empty(rows, vocab, dtype=torch.float32, device=probs.device)
    packed = torch.empty(rows, 2 + width, dtype=torch.int64, device=probs.device)
    in_fours = all(n % 4 == 0 for n in (vocab, probs.stride(0), probs.stride(1)))
    launch(
        _reject_kernel,
        (rows,),
        probs,
        packed_ptr=packed,
        left_ptr=left,
        probs_ptr=probs,
        draft_ptr=draft_probs,
        tokens_ptr=tokens.contiguous(),
        parents_ptr=parents.contiguous(),
        num_nodes_ptr=num_nodes.contiguous(),
        uniforms_ptr=uniforms.contiguous(),
        noise_ptr=noise.contiguous(),
        probs_stride_row=probs.stride(0),
        probs_stride_node=probs.stride(1),
        draft_stride_row=draft_probs.stride(0),
        draft_stride_node=draft_probs.stride(1),
        vocab=vocab,
        width=width,
        NODES=triton.next_power_of_2(width),
        BLOCK=_BLOCK,
        ALIGNED=16 if in_fours and probs.data_ptr() % 16 == 0 else 4,
        num_warps=8,
    )
    return TreeWalk(packed)


_WORD = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
_WORDS = 128


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
    """See `kernels.compact_path`; the tensors share one device."""
    assert len(table.by_device) == 1, "one launch serves one device"
    path = path if path.stride(1) == 1 else path.contiguous()
    launch(
        _compact_path_kernel,
        (len(table.tensors), len(path), triton.cdiv(table.max_words, _WORDS)),
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
        BLOCK=_WORDS,
        num_warps=4,
    )

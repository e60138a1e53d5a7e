"""Walk and compaction without a word to the host: shapes known beforehand, nothing read back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lookahead_hf import kernels
from lookahead_hf.kernels import PathTable, TreeWalk


class DraftViews(NamedTuple):
    """A step's draft on the device; node 0 is the row's last token.

    Attributes:
        tokens: [rows, width] int64, the last token again in padding.
        parents: Parent of each node, -1 for node 0 and in padding, [rows, width] int64.
        depth: 0 for node 0 and in padding, [rows, width] int64.
        bits: Bit j says that node j is an ancestor of it, or itself, [rows, width] int64.
        num_nodes: Drafted nodes of each row, [rows] int64.
        live: 1 for rows whose text goes on, else 0, [rows] int64.
        kept: Tokens of each row that the host has kept in the cache, [rows] int64.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    bits: torch.Tensor
    num_nodes: torch.Tensor
    live: torch.Tensor
    kept: torch.Tensor


def walk(
    scores: torch.Tensor,  # [rows, width, vocab]
    draft: DraftViews,
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    keep_scan: bool = False,
) -> TreeWalk:
    """What `kernels.verify_tree` does.

    Where no Triton kernel runs this takes a few dozen tensor operations for a tree of any shape, so
    that it can be part of a graph; the twin walks on the host.
    """
    if kernels.backend(scores.device) == "triton":
        depth = None if noise is None else draft.depth
        tree = draft.tokens, draft.parents, draft.num_nodes
        return kernels.verify_tree(scores, *tree, noise, depth, keep_scan=keep_scan)
    best = _best(scores, draft.depth, noise)
    width = best.shape[1]
    node = torch.arange(width, device=best.device)
    follows = draft.tokens == best.gather(1, draft.parents.clamp(min=0))
    follows &= (node > 0) & (node <= draft.num_nodes[:, None]) & _is_first(draft)
    # A node is on the path where it and all its ancestors follow: one bit each in a word.
    right = (follows.long() << node).sum(1) | 1
    on_path = (draft.bits & ~right[:, None] == 0) & (follows | (node == 0))
    accepted = on_path.sum(1) - 1
    place = torch.where(on_path, draft.depth, width)
    path = best.new_full((len(best), width + 1), -1).scatter_(1, place, node.expand_as(place))
    last = path.gather(1, accepted[:, None])
    return TreeWalk(torch.cat([accepted[:, None], best.gather(1, last), path[:, :width]], 1))


def _best(
    scores: torch.Tensor, depth: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:  # [rows, width]
    if noise is not None:
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        scores = scores / noise[rows, depth.clamp(max=noise.shape[1] - 1)]
    return scores.argmax(-1)


def _is_first(draft: DraftViews) -> torch.Tensor:
    """Whether no sibling with the same token stands before a node, [rows, width] bool."""
    same = draft.tokens[:, :, None] == draft.tokens[:, None]
    same &= draft.parents[:, :, None] == draft.parents[:, None]
    return ~same.tril(-1).any(2)


def compact(
    table: PathTable,
    first: torch.Tensor,  # [rows] slot of node 0
    packed: torch.Tensor,  # [rows, 2 + width]
) -> None:
    """Move the accepted paths together, in every tensor `[rows, slots, ...]` of the table."""
    accepted, path = packed[:, 0], packed[:, 2:]
    if kernels.backend(first.device) == "triton":
        kernels.compact_path(table, first, path, accepted + 1)
        return
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    rows = torch.arange(len(path), device=path.device)[:, None]
    source = first[:, None] + torch.where(path < 0, place, path)
    target = first[:, None] + place
    for tensor in table.tensors:
        offset = rows * tensor.shape[1]
        flat = tensor.view(-1, *tensor.shape[2:])
        moved = flat.index_select(0, (offset + source).reshape(-1))
        flat.index_copy_(0, (offset + target).reshape(-1), moved)

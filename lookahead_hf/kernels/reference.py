"""Torch twins of the kernels: what runs without Triton, and what the kernels are tested against.

A graph may capture `verify_tree` and `compact_path`: they take the same operations for trees of any
shape and never wait for the device. `tree_attention` has no twin: without Triton the model's own
attention reads the mask of the step.
"""

from __future__ import annotations

import torch

from lookahead_hf.kernels.data import PathTable, TopRows, TreeWalk


def verify_tree(
    scores: torch.Tensor,  # [rows, 1 + nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    depth: torch.Tensor | None = None,  # [rows, 1 + nodes]
) -> TreeWalk:
    """See `dispatch.verify_tree`; there is no scan to keep."""
    width = scores.shape[1]
    if noise is not None and depth is not None:
        row = torch.arange(len(scores), device=scores.device)[:, None]
        scores = scores / noise[row, depth.long().clamp(0, noise.shape[1] - 1)]
    best, node = scores.argmax(-1), torch.arange(width, device=scores.device)
    above = parents.long().clamp(min=0)
    alike = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    is_first = ~alike.tril(-1).any(2)  # no earlier sibling holds the same token
    follows = (tokens == best.gather(1, above)) & is_first
    follows &= (node > 0) & (node <= num_nodes[:, None])
    # A node is on the path if it and all its ancestors follow. Each round doubles how many of them
    # a node has asked; node 0 is its own parent.
    on_path = follows | (node == 0)
    for _ in range((width - 1).bit_length()):
        on_path &= on_path.gather(1, above)
        above = above.gather(1, above)
    # Parents come before their children, so the path is in the order of the nodes.
    rank = on_path.long().cumsum(1) - 1
    place = torch.where(on_path, rank, width)
    path = best.new_full((len(best), width + 1), -1)
    path.scatter_(1, place, node.expand_as(place))
    accepted = rank[:, -1:]
    bonus = best.gather(1, path.gather(1, accepted))
    best = best.masked_fill(node > num_nodes[:, None], -1)
    return TreeWalk(torch.cat([accepted, bonus, path[:, :width]], 1), best)


def reject_tree(
    probs: torch.Tensor,  # [rows, 1 + nodes, vocab]
    draft_probs: torch.Tensor,  # [rows, nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    uniforms: torch.Tensor,  # [rows, nodes]
    noise: torch.Tensor,  # [rows, vocab]
) -> TreeWalk:
    """See `dispatch.reject_tree`."""
    packed = []
    for row, (row_tokens, row_parents, count) in enumerate(
        zip(tokens.tolist(), parents.tolist(), num_nodes.tolist(), strict=True)
    ):
        path, left, total = [0], probs[row, 0], torch.ones((), device=probs.device)
        for node in range(1, count + 1):
            if row_parents[node] != path[-1]:
                continue
            token, draft = row_tokens[node], draft_probs[row, node - 1]
            if bool(uniforms[row, node - 1] * draft[token] * total < left[token]):
                path.append(node)
                left, total = probs[row, node], torch.ones_like(total)
            else:
                left = (left / total.where(total > 0, 1.0) - draft).clamp_(min=0)
                total = left.sum()
        # Only rounding can leave nothing; then the target's own distribution is drawn from.
        left = left.where(total > 0, probs[row, path[-1]])
        unused = [-1] * (tokens.shape[1] - len(path))
        packed.append([len(path) - 1, int((left / noise[row]).argmax()), *path, *unused])
    return TreeWalk(torch.tensor(packed, dtype=torch.int64, device=probs.device))


def compact_path(
    table: PathTable,
    lengths: torch.Tensor,  # [rows]
    path: torch.Tensor,  # [rows, any]
    num_kept: torch.Tensor,  # [rows]
) -> None:
    """See `dispatch.compact_path`; a token that does not move is written to its place again."""
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    kept = place < num_kept[:, None]
    row = torch.arange(len(path), device=path.device)[:, None]
    # Entries that do not count stand for node 0 again, so that no slot gets two values.
    source = lengths[:, None] + path.where(kept, 0)
    target = lengths[:, None] + place.where(kept, 0)
    for tensor in table.tensors:
        tensor[row, target] = tensor[row, source]


def topk_rows(logits: torch.Tensor, k: int) -> TopRows:
    """See `dispatch.topk_rows`; among equal entries any may be chosen."""
    best = logits.topk(k, dim=1)
    return TopRows(best.values.float(), best.indices, logits.float().logsumexp(1))

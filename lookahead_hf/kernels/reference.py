"""Torch twins of the kernels: what runs without Triton, and what the kernels are tested against.

A graph may capture `verify_tree` and `compact_path`: they take the same operations for trees of any
shape and never wait for the device. `tree_attention` has no twin: without Triton the model's own
attention reads the mask of the step.
"""

from __future__ import annotations

import torch

from lookahead_hf.kernels.data import PathTable, RowScan, TopKCounts, TopRows, TreeWalk


def verify_tree(
    scores: torch.Tensor,  # [rows, 1 + nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    depth: torch.Tensor | None = None,  # [rows, 1 + nodes]
    keep_scan: bool = False,
) -> TreeWalk:
    """Choose a token at every node of a draft tree, and walk down while a child holds it.

    Without `noise` the token at a node is `argmax(scores)`. With it, `scores` are probabilities and
    the token is `argmax(scores / noise[depth])`, as `torch.multinomial` computes it. NaN and ties
    are treated as in `torch.argmax`.

    Args:
        scores: Logits or probabilities after every node, [rows, 1 + nodes, vocab].
        tokens: Node 0 is the row's last token, then its drafted tokens, [rows, 1 + nodes] integers.
        parents: Parent of each node in the same numbering, before its children, -1 for node 0,
            [rows, 1 + nodes] integers.
        num_nodes: Drafted nodes of each row, node 0 not counted, [rows] integers.
        noise: One block of noise per depth, [rows, depths, vocab] float32.
        depth: Depth of each node, 0 for node 0, needed with `noise`, [rows, 1 + nodes] integers.
        keep_scan: Whether the kernel keeps what saves `topk_rows` its pass over the same scores;
            without noise only.

    Returns:
        The accepted paths. The bonus token is the one chosen at the last node of the path.
    """
    assert (noise is None) == (depth is None), "noise and depth go together"
    assert noise is None or not keep_scan, "scores divided by noise are of no use to topk_rows"
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
    """Walk down a draft tree by rejection sampling: what is emitted is distributed as `probs`.

    A child is accepted with probability `min(1, p / q)`. Where it is rejected, the next sibling is
    tried on the residual `max(p - q, 0)`; where none is left, the recovered token is drawn from it.
    Where the path ends in a leaf, the bonus token is drawn from the target's distribution there.

    Args:
        probs: The target's distribution after every node, [rows, 1 + nodes, vocab] float32.
        draft_probs: What each drafted node was drawn from, node `1 + i` at index `i`; one token at
            1.0 for a draft without probabilities, [rows, nodes, vocab] float32.
        tokens: As in `verify_tree`, and so are `parents` and `num_nodes`.
        parents: As there.
        num_nodes: As there.
        uniforms: A random number of [0, 1) for each drafted node, [rows, nodes] float32.
        noise: Exponential noise, which decides the last token of each row, [rows, vocab] float32.

    Returns:
        The accepted paths, without `best`; `bonus` holds the bonus or the recovered token.
    """
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
    """See `kernels.compact_path`; a token that does not move is written to its place again."""
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    kept = place < num_kept[:, None]
    row = torch.arange(len(path), device=path.device)[:, None]
    # Entries that do not count stand for node 0 again, so that no slot gets two values.
    source = lengths[:, None] + path.where(kept, 0)
    target = lengths[:, None] + place.where(kept, 0)
    for tensor in table.tensors:
        tensor[row, target] = tensor[row, source]


def topk_rows(
    logits: torch.Tensor,  # [rows, vocab]
    k: int,
    scan: RowScan | None = None,
    wanted: TopKCounts | None = None,
) -> TopRows:
    """Find the `k` best entries of every row, best first, and the `logsumexp` of the row.

    Args:
        logits: Scores, [rows, vocab].
        k: How many, at most the size of the vocabulary.
        scan: `TreeWalk.scan` of these scores, if `verify_tree` kept it. Results for rows of
            padding are then undefined.
        wanted: Limits below `k` for rows that are the nodes of a step's trees. Entries beyond a
            row's limit are undefined, and a kernel skips them.

    Returns:
        Values, [rows, k] float32, token ids, [rows, k] int64, and sums, [rows] float32.
    """
    best = logits.topk(k, dim=1)
    return TopRows(best.values.float(), best.indices, logits.float().logsumexp(1))

"""Torch twins of the kernels: what runs without Triton, and what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from lookahead_hf.kernels.path_table import PathTable
from lookahead_hf.kernels.row_scan import RowScan, TopRows
from lookahead_hf.kernels.tree_walk import TreeWalk

_TILE = 512
_TOPK_TILE = 32


def verify_tree(
    scores: torch.Tensor,  # [rows, 1 + nodes, vocab]
    tokens: torch.Tensor,  # [rows, 1 + nodes]
    parents: torch.Tensor,  # [rows, 1 + nodes]
    num_nodes: torch.Tensor,  # [rows]
    noise: torch.Tensor | None = None,  # [rows, depths, vocab]
    depth: torch.Tensor | None = None,  # [rows, 1 + nodes]
    keep_scan: bool = False,
) -> TreeWalk:
    """See `dispatch.verify_tree`; there is no scan to keep."""
    width = scores.shape[1]
    if noise is not None and depth is not None:
        scores = _divided(scores, noise, depth)
    best = _argmax(scores)
    best.masked_fill_(torch.arange(width, device=best.device) > num_nodes[:, None], -1)
    paths, bonus = [], []
    for chosen, row_tokens, row_parents, count in zip(
        best.tolist(), tokens.tolist(), parents.tolist(), num_nodes.tolist(), strict=True
    ):
        path = [0]
        # Parents stand before their children, so one pass over the nodes is the walk.
        for node in range(1, count + 1):
            if row_parents[node] == path[-1] and row_tokens[node] == chosen[path[-1]]:
                path.append(node)
        paths.append(path)
        bonus.append(chosen[path[-1]])
    return TreeWalk(_packed(paths, bonus, width, scores.device), best)


def _divided(probs: torch.Tensor, noise: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """`probs[row, node] / noise[row, depth[row, node]]`.

    Node by node it takes half as long on a CPU as with the noise gathered first.
    """
    scores = torch.empty_like(probs)
    for row, depths in enumerate(depth.clamp(0, noise.shape[1] - 1).tolist()):
        for node, at in enumerate(depths):
            torch.div(probs[row, node], noise[row, at], out=scores[row, node])
    return scores


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
    paths, bonus = [], []
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
        # Nothing is left only where rounding made it so: the target's own distribution stands in.
        left = left.where(total > 0, probs[row, path[-1]])
        paths.append(path)
        bonus.append(int((left / noise[row]).argmax()))
    return TreeWalk(_packed(paths, bonus, tokens.shape[1], probs.device))


def _packed(
    paths: list[list[int]], bonus: list[int], width: int, device: torch.device
) -> torch.Tensor:
    rows = [
        [len(path) - 1, token, *path, *[-1] * (width - len(path))]
        for path, token in zip(paths, bonus, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _argmax(scores: torch.Tensor) -> torch.Tensor:  # [..., vocab] -> [...]
    """`scores.argmax(-1)`, by way of the maxima of tiles.

    On a CPU `amax` is vectorised and `argmax` is not: 17 rows of 49,152 take 0.12 ms instead of
    0.69 in fp32, 0.30 ms instead of 2.97 in bf16.
    """
    vocab = scores.shape[-1]
    if vocab < 8 * _TILE:
        return scores.argmax(-1)
    tiles = vocab // _TILE
    maxima = scores[..., : tiles * _TILE].unflatten(-1, (tiles, _TILE)).amax(-1)
    if vocab % _TILE:
        # The last tile overlaps the one before it, which wins ties as the lower index must.
        maxima = torch.cat([maxima, scores[..., -_TILE:].amax(-1, keepdim=True)], -1)
    start = (maxima.argmax(-1, keepdim=True) * _TILE).clamp_(max=vocab - _TILE)
    tile = start + torch.arange(_TILE, device=scores.device)
    return start[..., 0] + scores.gather(-1, tile).argmax(-1)


def compact_path(
    tensors: Sequence[torch.Tensor] | PathTable,  # [batch, slot, ...] each
    lengths: torch.Tensor,  # [rows]
    path: torch.Tensor,  # [rows, any]
    num_kept: torch.Tensor,  # [rows]
) -> None:
    """See `dispatch.compact_path`."""
    table = tensors if isinstance(tensors, PathTable) else PathTable(tensors)
    counts = num_kept.tolist()
    for row, (length, nodes, count) in enumerate(
        zip(lengths.tolist(), path.tolist(), counts, strict=True)
    ):
        first = next((i for i in range(count) if nodes[i] != i), count)
        if first == count:
            continue
        source = [length + node for node in nodes[first:count]]
        for part in table.by_device:
            _move(part, row, source, length + first)


def _move(table: PathTable, row: int, source: list[int], target: int) -> None:
    """Copy slots `source` of a row to `target` and on; indexing reads all before it writes."""
    if table.device.type == "cpu":
        index = torch.tensor(source).numpy()
        for slots in table.host_rows[row]:
            slots[target : target + len(source)] = slots[index]
        return
    on_device = torch.tensor(source, device=table.device)
    for tensor in table.tensors:
        tensor[row, target : target + len(source)] = tensor[row, on_device]


def topk_rows(logits: torch.Tensor, k: int, scan: RowScan | None = None) -> TopRows:
    """See `dispatch.topk_rows`; among equal entries any may be chosen.

    As in the kernel, only the k tiles with the greatest maxima are searched: no other tile can hold
    one of the k best. Here a tile is a column of a row laid out as [32, vocab / 32], which lets
    `amax` work on whole vectors: on a CPU 17 rows of 49,152 take 0.23 ms instead of 0.97.
    """
    return TopRows(*_best_of_columns(logits, k), logits.float().logsumexp(1))


def _best_of_columns(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocab = logits.shape[1]
    columns = vocab // _TOPK_TILE
    if columns < 8 * k:
        return _topk(logits, k)
    covered = columns * _TOPK_TILE
    maxima = logits[:, :covered].unflatten(1, (_TOPK_TILE, columns)).amax(1)
    steps = torch.arange(0, covered, columns, device=logits.device)
    ids = (_topk(maxima, k)[1][:, None] + steps[:, None]).flatten(1)
    rest = torch.arange(covered, vocab, device=logits.device).expand(len(logits), -1)
    ids = torch.cat([ids, rest], 1)
    values, place = _topk(logits.gather(1, ids), k)
    return values, ids.gather(1, place)


def _topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = values.topk(k, dim=1)
    return best.values.float(), best.indices


def tree_attention(
    q: torch.Tensor,  # [rows, heads, nodes, dim]
    k: torch.Tensor,  # [rows, kv_heads, slots, dim]
    v: torch.Tensor,  # [rows, kv_heads, slots, v_dim]
    lengths: torch.Tensor,  # [rows]
    ancestors: torch.Tensor,  # [rows, nodes]
    scale: float,
    window: int = 0,
    columns: torch.Tensor | None = None,  # [rows, num_columns]
    pads: torch.Tensor | None = None,  # [rows]
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:
    """See `dispatch.tree_attention`; keys are read in slot order."""
    rows, heads, nodes, _ = q.shape
    groups = heads // k.shape[1]
    end = int(lengths.max()) + nodes
    k, v = k[:, :, :end], v[:, :, :end]
    seen = _seen(lengths, ancestors, end)
    if window:
        seen &= _in_window(lengths, ancestors, end, window, columns, pads)
    if rows > 1:
        # Behind a shorter row memory may never have been written, and zero times NaN is NaN.
        unseen = ~seen.any(1)[:, None, :, None]
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    # The heads of a group are rows of one product, so that K and V are not repeated.
    q = q.reshape(rows, -1, groups * nodes, q.shape[3])
    seen = seen.repeat(1, groups, 1)[:, None]
    if softcap or sinks is not None:
        out = _with_softcap_and_sinks(q, k, v, seen, scale, softcap, sinks)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous()


def _with_softcap_and_sinks(
    q: torch.Tensor,  # [rows, kv_heads, groups * nodes, dim]
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,  # [rows, 1, groups * nodes, slots]
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    score = q.float() @ k.float().transpose(2, 3) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        groups = len(sinks) // k.shape[1]
        sink = sinks.float().repeat_interleave(q.shape[2] // groups).view(1, k.shape[1], -1, 1)
        score = torch.cat([score, sink.expand(len(q), -1, -1, 1)], -1)
    weight = score.softmax(-1)[..., : k.shape[2]]
    return (weight @ v.float()).to(q.dtype)


def _seen(lengths: torch.Tensor, ancestors: torch.Tensor, slots: int) -> torch.Tensor:
    """Which slots each node reads, [rows, nodes, slots] bool."""
    node = torch.arange(slots, device=lengths.device) - lengths[:, None]
    bits = ancestors[:, :, None] >> node.clamp(0, 63)[:, None]
    return (node < 0)[:, None] | ((node < 64)[:, None] & (bits & 1 == 1))


def _in_window(
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    slots: int,
    window: int,
    columns: torch.Tensor | None,
    pads: torch.Tensor | None,
) -> torch.Tensor:
    """Which slots are near enough to each node, by column, [rows, nodes, slots] bool."""
    slot = torch.arange(slots, device=lengths.device).expand(len(lengths), -1)
    depth = (ancestors[:, :, None] >> torch.arange(64, device=lengths.device) & 1).sum(2) - 1
    node = (slot - lengths[:, None]).clamp(0, ancestors.shape[1] - 1)
    column = torch.where(slot < lengths[:, None], slot, lengths[:, None] + depth.gather(1, node))
    at = lengths[:, None] + depth
    if columns is not None and pads is not None:
        column, at = column + pads[:, None], at + pads[:, None]
        known = columns.shape[1]
        of_prompt = slot[:, :known] < lengths[:, None]
        column[:, :known] = torch.where(of_prompt, columns, column[:, :known])
    return at[:, :, None] - column[:, None] < window

"""Random draft trees, a plain walk over them and plain attention, for the tests of the kernels."""

from __future__ import annotations

from typing import Any

import torch


def random_tree(
    rows: int, nodes: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents, depth, [rows, 1 + nodes], and counts, [rows]; row 0 is full, the last one empty."""
    parents = torch.full((rows, 1 + nodes), -1)
    depth = torch.zeros(rows, 1 + nodes, dtype=torch.int64)
    for row in range(rows):
        for node in range(1, 1 + nodes):
            chained = torch.rand((), generator=generator) < 0.5
            parent = node - 1 if chained else int(torch.randint(0, node, (), generator=generator))
            parents[row, node] = parent
            depth[row, node] = depth[row, parent] + 1
    counts = torch.randint(0, nodes + 1, (rows,), generator=generator)
    counts[0] = nodes
    if rows > 1:
        counts[-1] = 0
    return parents, depth, counts


def plant(
    tokens: torch.Tensor, parents: torch.Tensor, best: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Let most nodes hold the token that is best at their parent."""
    hit = torch.rand(tokens.shape, generator=generator) < 0.7
    hit[:, 0] = False
    return torch.where(hit, best.gather(1, parents.clamp(min=0)), tokens)


def walk(
    best: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, counts: torch.Tensor
) -> tuple[list[list[int]], list[int]]:
    """Accepted path, node 0 first, and bonus token of every row, by following children."""
    paths, bonus = [], []
    for row in range(len(counts)):
        path = [0]
        while True:
            fits = [
                node
                for node in range(1, int(counts[row]) + 1)
                if parents[row, node] == path[-1] and tokens[row, node] == best[row, path[-1]]
            ]
            if not fits:
                break
            path.append(fits[0])
        paths.append(path)
        bonus.append(int(best[row, path[-1]]))
    return paths, bonus


def under_mask(
    mask: torch.Tensor,  # [rows, 1, width, slots]
    query: torch.Tensor,  # [rows, heads, width, dim]
    key: torch.Tensor,  # [rows, kv_heads, slots, dim]
    value: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Attention as it is written in the books, in float64."""
    groups = query.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    score = query.double() @ k.transpose(2, 3) * scaling
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(mask < 0, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, column], -1)
    weight = score.softmax(-1)[..., : k.shape[2]]
    return (weight @ v).transpose(1, 2).to(query.dtype)


def by_words(
    block: Any,
    held: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `tree_attention.attend` returns, without the kernel and without the block's mask."""
    seen = held.lengths, block.words, held.kind.window or 0, held.columns, held.offsets
    return _by_words(query, key, value, *seen, scaling, softcap, sinks)


@torch.library.custom_op("lookahead_hf_tests::by_words", mutates_args=())
def _by_words(  # noqa: PLR0913 (the kernel's signature)
    query: torch.Tensor,  # [rows, heads, width, dim]
    key: torch.Tensor,  # [rows, kv_heads, slots, dim]
    value: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    window: int,
    columns: torch.Tensor | None,
    pads: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One operation for those who count them, as the kernel is."""
    width = query.shape[2]
    lengths = lengths[:, None]
    slot = torch.arange(key.shape[2])
    node = slot - lengths  # [rows, slots]
    of_block = node.clamp(0, width - 1)
    drafted = (ancestors[:, :, None] >> of_block[:, None] & 1 == 1) & (node < width)[:, None]
    seen = torch.where((node < 0)[:, None], True, drafted)
    if window:
        assert columns is not None and pads is not None
        depth = (ancestors[:, :, None] >> torch.arange(64) & 1).sum(2) - 1
        column = lengths + pads[:, None] + depth
        of_slot = torch.where(node < 0, columns[:, : key.shape[2]], column.gather(1, of_block))
        seen = seen & (column[:, :, None] - of_slot[:, None] < window)
    mask = torch.where(seen, 0.0, -1.0)[:, None]
    return under_mask(mask, query, key, value, scaling, softcap, sinks)

"""Calls of the kernels as a step makes them, on tensors without memory: what is compiled ahead.

Vocabularies that divide by 16 and one that does not, drafts of 63 nodes and fewer, the three types
of logits, one and two tokens' words in the cache's layout, and heads of all sizes and groupings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lookahead_hf.kernels import attention, compact, reject, topk, verify
from lookahead_hf.kernels.path_table import PathTable


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _verify(nodes: int, vocab: int, dtype: torch.dtype, sampled: bool = False) -> None:
    """A step's verification; where it is not sampled, the best entries of its logits as well."""
    rows, width = 2, 1 + nodes
    scores = _empty(rows, width, vocab, dtype=dtype)
    tree = _empty(rows, width), _empty(rows, width), _empty(rows)
    if sampled:
        noise = _empty(rows, 12, vocab, dtype=torch.float32)
        verify.verify_tree(scores, *tree, noise, _empty(rows, width))
        return
    walk = verify.verify_tree(scores, *tree, keep_scan=True)
    topk.topk_rows(scores.flatten(0, 1), 48, walk.scan)


def _topk(vocab: int, k: int, dtype: torch.dtype) -> None:
    topk.topk_rows(_empty(64, vocab, dtype=dtype), k)


def _reject(nodes: int, vocab: int) -> None:
    rows, width = 2, 1 + nodes
    probs = _empty(rows, width, vocab, dtype=torch.float32)
    uniforms = _empty(rows, nodes, dtype=torch.float32)
    tree = _empty(rows, width), _empty(rows, width), _empty(rows)
    reject.reject_tree(probs, probs[:, 1:], *tree, uniforms, probs[:, 0])


def _compact(width: int, dim: int) -> None:
    layers = [_empty(2, 4096, 8, dim, dtype=torch.bfloat16) for _ in range(2)]
    compact.compact_path(PathTable(layers), _empty(2), _empty(2, width), _empty(2))


def _attend(
    nodes: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    extras: bool = False,
) -> None:
    """Attention of one layer; `heads` are those of the queries and those of K and V."""
    q = _empty(2, nodes, heads[0], dim, dtype=dtype).transpose(1, 2)
    k = _empty(2, 4096, heads[1], dim, dtype=dtype).transpose(1, 2)
    given = q, k, k, _empty(2), _empty(2, nodes), dim**-0.5
    if not extras:
        attention.tree_attention(*given)
        return
    attention.tree_attention(
        *given,
        window=1024,
        columns=_empty(2, 4096),
        pads=_empty(2),
        softcap=50.0,
        sinks=_empty(heads[0], dtype=dtype),
    )


CASES: dict[str, Callable[[], None]] = {
    "63 nodes, 151936 bf16": partial(_verify, 63, 151936, torch.bfloat16),
    "15 nodes, 50257 fp16": partial(_verify, 15, 50257, torch.float16),
    "63 nodes sampled, 128256": partial(_verify, 63, 128256, torch.float32, sampled=True),
    "k=8, 32000 fp32": partial(_topk, 32000, 8, torch.float32),
    "15 drawn nodes, 151936": partial(_reject, 15, 151936),
    "64 tokens, whole words": partial(_compact, 64, 128),
    "65 tokens, odd heads": partial(_compact, 65, 81),
    "64 x 28/4 heads of 128 bf16": partial(_attend, 64, (28, 4), 128),
    "1 x 28/4 heads of 128 bf16": partial(_attend, 1, (28, 4), 128),
    "16 x 32/1 heads of 64 fp16, window softcap sinks": partial(
        _attend, 16, (32, 1), 64, torch.float16, extras=True
    ),
    "64 x 8/4 heads of 256 bf16": partial(_attend, 64, (8, 4), 256),
    "64 x 32/8 heads of 128 fp32": partial(_attend, 64, (32, 8), 128, torch.float32),
}
"""What is printed of each use, and the use."""

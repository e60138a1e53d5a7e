"""The growth of recycling trees in plain Python: what the compiled one must find."""

from __future__ import annotations

import heapq

import numpy as np

from lookahead_hf.drafting.sources._recycling_numba import (
    NEXT_START,
    NUM_PROBS,
    PROB_EDGES,
    RANK_EDGES,
    SINGLE_START,
)
from tests.oracles.logits_memory import find


def grow_trees(
    keys: np.ndarray,  # [places, ways] int64: the logits memory
    tokens: np.ndarray,  # [entries, top_k] int32
    probs: np.ndarray,  # [entries, top_k] float32
    contexts: np.ndarray,  # [rows, 2] int64: the last two tokens, -1 where there is none
    next_tokens: np.ndarray,  # [rows, others] int32: other candidates of the last logits, -1: none
    next_probs: np.ndarray,  # [rows, others] float32
    live: np.ndarray,  # [rows] bool
    rates: np.ndarray,  # [NUM_BUCKETS] float32
    max_nodes: int,
    cutoff: float,
) -> tuple[np.ndarray, ...]:
    """Grow each live row's tree best first from what the target expected after the same tokens.

    The children of a node are the remembered next tokens of its last two tokens, or else of its
    last one. The last emitted token has further children: the tokens that the target considered
    for its place, since a token that was not chosen now is often chosen next. Candidates less
    likely than `cutoff` are not followed.

    Returns:
        row_offsets, token_ids, parents, depth, score, entry_offsets, entry_bucket.
    """
    flat: list[tuple[int, int, int, float, list[int]]] = []
    offsets = [0]
    for row in range(len(contexts)):
        if live[row]:
            flat.extend(
                _grow(
                    keys, tokens, probs, contexts[row].tolist(),
                    (next_tokens[row], next_probs[row]), rates, max_nodes, cutoff,
                )
            )  # fmt: skip
        offsets.append(len(flat))
    return (
        np.array(offsets, np.int64),
        np.array([node[0] for node in flat], np.int64),
        np.array([node[1] for node in flat], np.int32),
        np.array([node[2] for node in flat], np.int32),
        np.array([node[3] for node in flat], np.float32),
        np.cumsum([0] + [len(node[4]) for node in flat]).astype(np.int64),
        np.array([bucket for node in flat for bucket in node[4]], np.int32),
    )


def bucket_of(rank: int, prob: float) -> int:
    """Class of a token by its rank and probability, below `SINGLE_START`."""
    row = sum(rank >= edge for edge in RANK_EDGES)
    return row * NUM_PROBS + sum(prob >= edge for edge in PROB_EDGES)


def _grow(
    keys: np.ndarray,
    tokens: np.ndarray,
    probs: np.ndarray,
    context: list[int],
    after: tuple[np.ndarray, np.ndarray],
    rates: np.ndarray,
    max_nodes: int,
    cutoff: float,
) -> list[tuple[int, int, int, float, list[int]]]:
    """Nodes of one row: token, parent, depth, reach, buckets."""
    tree: list[tuple[int, int, int, float, list[int]]] = []
    heap: list[tuple[float, int, int, int, int, list[int]]] = []
    number = 0

    def offer(parent: int, depth: int, above: float, children: dict[int, list[int]]) -> None:
        nonlocal number
        reach = [above * _chance(buckets, rates) for buckets in children.values()]
        total = sum(reach)
        for (token, buckets), own in zip(children.items(), reach, strict=True):
            own = own * (above / total) if total > above else own
            if own > cutoff:
                heapq.heappush(heap, (-own, number, token, parent, depth, buckets))
            number += 1

    children = _remembered(keys, tokens, probs, context[0], context[1])
    for token, bucket in _next_candidates(*after).items():
        children.setdefault(token, []).append(bucket)
    offer(-1, 1, 1.0, children)
    while heap and len(tree) < max_nodes:
        negative, _, token, parent, depth, buckets = heapq.heappop(heap)
        before = tree[parent][0] if parent >= 0 else context[1]
        tree.append((token, parent, depth, -negative, buckets))
        below = _remembered(keys, tokens, probs, before, token)
        offer(len(tree) - 1, depth + 1, -negative, below)
    return tree


def _chance(buckets: list[int], rates: np.ndarray) -> float:
    if len(buckets) == 1:
        return float(rates[buckets[0]])
    return 1.0 - (1.0 - float(rates[buckets[0]])) * (1.0 - float(rates[buckets[1]]))


def _remembered(
    keys: np.ndarray, tokens: np.ndarray, probs: np.ndarray, before: int, last: int
) -> dict[int, list[int]]:
    """Remembered next tokens of a context with their buckets."""
    entry, start = find(keys, before, last), 0
    if entry < 0:
        entry, start = find(keys, -1, last), SINGLE_START
    if entry < 0:
        return {}
    remembered = tokens[entry].tolist(), probs[entry].tolist()
    return {
        token: [start + bucket_of(rank, p)]
        for rank, (token, p) in enumerate(zip(*remembered, strict=True))
        if token >= 0
    }


def _next_candidates(next_tokens: np.ndarray, next_probs: np.ndarray) -> dict[int, int]:
    candidates = next_tokens.tolist(), next_probs.tolist()
    return {
        token: NEXT_START + bucket_of(rank, p)
        for rank, (token, p) in enumerate(zip(*candidates, strict=True))
        if token >= 0
    }

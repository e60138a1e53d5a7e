"""Merges the sources' trees by shared prefixes and cuts drafts out of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lookahead_hf.draft import ROOT, DraftTree, Evidence, place_in_row
from lookahead_hf.drafting.rates import Calibration

ANY_TOKEN = 2**62
"""Vocabulary size if it is unknown."""


def merge(
    proposals: Sequence[DraftTree],
    calibration: Calibration,
    max_nodes: int,
    vocab_size: int = ANY_TOKEN,
    max_depth: np.ndarray | None = None,
) -> DraftTree:
    """Unite the trees of a calibration's sources and keep each row's likeliest nodes, best first.

    Left out are nodes with a token id from `vocab_size` on, with all nodes below, and those deeper
    than `max_depth`, [rows]. Path probabilities, the new scores, follow from the calibration alone;
    nodes without evidence are in bucket 0. All sources of a node are in the new evidence.

    The first source with `probs` draws: the nodes on its path of first children come before all
    others, so that neither their tokens nor another source's decide whether they are kept, and
    keep what they were drawn from. All other nodes are certain.
    """
    from lookahead_hf.drafting._numba import merge_trees

    row_offsets = np.array([tree.row_offsets for tree in proposals], np.int64)
    row_offsets[1:] += row_offsets[:-1, -1].cumsum()[:, None]
    token_ids = np.concatenate([tree.token_ids for tree in proposals], dtype=np.int64)
    parents = np.concatenate([tree.parents for tree in proposals], dtype=np.int32)
    sizes, buckets = zip(*map(_evidence_of, proposals), strict=True)
    entry_offsets = np.zeros(len(token_ids) + 1, np.int64)
    np.concatenate(sizes).cumsum(out=entry_offsets[1:])
    if max_depth is None:
        max_depth = np.full(row_offsets.shape[1] - 1, len(token_ids) + 1, np.int64)
    drawing = next((i for i, tree in enumerate(proposals) if tree.probs is not None), -1)
    offsets, tokens, parents, depth, score, entries, source, bucket, drawn = merge_trees(
        row_offsets, token_ids, parents, entry_offsets, np.concatenate(buckets, dtype=np.int32),
        calibration.rates, calibration.bucket_starts, max_depth, vocab_size, max_nodes, drawing,
    )  # fmt: skip
    evidence = Evidence(entries, source, bucket)
    tree = DraftTree(offsets, tokens, parents, depth, score, evidence)
    return tree if drawing < 0 else replace(tree, probs=proposals[drawing].probs, drawn=drawn)


def head(tree: DraftTree, num_nodes: int | np.ndarray) -> DraftTree:
    """Keep the first `num_nodes` (of all rows, or [rows]) of a merged tree, in depth-first order.

    The likeliest child comes first. So an accepted path is mostly in consecutive slots after the
    last token, and committing it moves no cache data.
    """
    from lookahead_hf.drafting._numba import head_order

    counts = np.minimum(np.diff(tree.row_offsets), num_nodes)
    offsets, order, parents = head_order(tree.row_offsets, tree.parents, counts)
    return _taken(tree, offsets, order, parents)


def likeliest_chain(tree: DraftTree, max_nodes: int | np.ndarray) -> DraftTree:
    """Keep a path of at most `max_nodes` per row of a merged tree: the likeliest child at every
    node."""
    longest = np.broadcast_to(max_nodes, tree.num_rows).tolist()
    order: list[int] = []
    offsets = np.zeros(tree.num_rows + 1, np.int64)
    for row in range(tree.num_rows):
        nodes = tree.row(row)
        at, first = ROOT, len(order)
        # Children come after their parents, so one pass over the nodes is the walk.
        for node, parent in enumerate(tree.parents[nodes].tolist()):
            if parent == at and len(order) - first < longest[row]:
                order.append(nodes.start + node)
                at = node
        offsets[row + 1] = len(order)
    parents = (place_in_row(offsets) - 1).astype(np.int32)
    return _taken(tree, offsets, np.array(order, np.int64), parents)


def _taken(
    tree: DraftTree, offsets: np.ndarray, order: np.ndarray, parents: np.ndarray
) -> DraftTree:
    """Return the tree of the nodes `order`, [kept], with new parents."""
    return DraftTree(
        offsets,
        tree.token_ids[order],
        parents,
        tree.depth[order],
        tree.score[order],
        _take_evidence(tree.evidence, order),
        tree.probs,
        None if tree.drawn is None else tree.drawn[order],
    )


def _evidence_of(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """Return how many entries each node of a source's tree has, [nodes], and all their buckets."""
    if tree.evidence is not None:
        return np.diff(tree.evidence.offsets), tree.evidence.bucket
    return np.ones(tree.num_nodes, np.int64), np.zeros(tree.num_nodes, np.int32)


def _take_evidence(evidence: Evidence | None, order: np.ndarray) -> Evidence | None:
    if evidence is None:
        return None
    begin = evidence.offsets[order]
    sizes = evidence.offsets[order + 1] - begin
    offsets = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    # Entry i of the result is as far from its node's first entry as in the old evidence.
    entries = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], sizes)
    return Evidence(offsets, evidence.source[entries], evidence.bucket[entries])

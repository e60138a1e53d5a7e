"""Merging the sources' trees and cutting the result."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.draft import ROOT, DraftTree
from lookahead_hf.drafting.ensemble import head, likeliest_chain, merge
from lookahead_hf.drafting.rates import Calibration
from tests.helpers.drafts import Fixed, assert_ordered, paths

NUM_BUCKETS = 4


def test_what_was_drawn_comes_first_and_keeps_its_row_of_probs() -> None:
    guess = DraftTree.from_rows([([4, 1, 5], [-1, -1, 1]), ([7], [-1])])
    drawn = DraftTree.from_rows([([3, 8, 9], [-1, -1, 0]), ([7, 2], [-1, 0])])
    drawn = replace(drawn, probs=torch.eye(5, 10))
    rates = Calibration([Fixed(0.9), Fixed(0.1), Fixed(0.5)])
    tree = merge([guess, drawn, drawn], rates, 3)
    assert tree.token_ids.tolist() == [3, 9, 4, 7, 2]
    assert tree.probs is drawn.probs and tree.drawn is not None
    assert tree.drawn.tolist() == [0, 2, -1, 3, 4]
    assert tree.score[2] < 1.0 and (tree.score >= 0.0).all()
    for cut, kept in ((head(tree, 2), [0, 2, 3, 4]), (likeliest_chain(tree, 1), [0, 3])):
        assert cut.probs is drawn.probs and cut.drawn is not None
        assert cut.drawn.tolist() == kept


def test_likeliest_chain_takes_the_first_child_at_every_node() -> None:
    tree = DraftTree.from_rows([([5, 6, 7, 8, 9], [-1, -1, 1, 0, 3]), ([], []), ([4, 3], [-1, -1])])
    tree = tree.with_buckets(np.arange(7))
    chain = likeliest_chain(tree, 2)
    assert chain.row_offsets.tolist() == [0, 2, 2, 3]
    assert chain.token_ids.tolist() == [5, 8, 4]
    assert chain.parents.tolist() == [ROOT, 0, ROOT]
    assert chain.depth.tolist() == [1, 2, 1]
    assert chain.evidence is not None
    assert chain.evidence.bucket.tolist() == [0, 3, 5]
    assert likeliest_chain(tree, 9).token_ids.tolist() == [5, 8, 9, 4]


@st.composite
def proposals(draw: st.DrawFn) -> list[DraftTree]:
    """Trees of up to three sources for the same rows, with a few unusable tokens."""
    num_rows = draw(st.integers(1, 3))
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        rows = []
        for _ in range(num_rows):
            size = draw(st.integers(0, 12))
            tokens = draw(st.lists(st.integers(-1, 5), min_size=size, max_size=size))
            parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
            rows.append((tokens, parents))
        tree = DraftTree.from_rows(rows)
        sizes = [draw(st.integers(0, 2)) for _ in range(tree.num_nodes)]
        offsets = np.cumsum([0, *sizes])
        buckets = [draw(st.integers(0, NUM_BUCKETS - 1)) for _ in range(offsets[-1])]
        trees.append(tree.with_buckets(np.array(buckets), offsets))
    if (drawing := draw(st.integers(-1, len(trees) - 1))) >= 0:
        trees[drawing] = replace(trees[drawing], probs=torch.ones(trees[drawing].num_nodes, 1))
    return trees


@settings(max_examples=150, deadline=None)
@given(trees=proposals(), max_nodes=st.integers(0, 20), depth=st.integers(0, 6), seed=st.integers())
def test_the_likeliest_nodes_of_all_sources_are_kept(
    trees: list[DraftTree], max_nodes: int, depth: int, seed: int
) -> None:
    rng = np.random.default_rng(abs(seed))
    # Few distinct rates, so that ties occur.
    sources = [Fixed(*rng.choice([0.0, 0.25, 0.5, 0.9, 1.0], NUM_BUCKETS)) for _ in trees]
    max_depth = np.full(trees[0].num_rows, depth)
    tree = merge(trees, Calibration(sources), max_nodes, vocab_size=5, max_depth=max_depth)
    assert tree.evidence is not None and (tree.depth <= depth).all()
    if tree.drawn is None:
        assert_ordered(tree, max_nodes)
    cut = head(tree, max_nodes // 2)
    for row in range(tree.num_rows):
        proposed: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        for source, each in enumerate(trees):
            for path, entries in nodes_of(each, row):
                proposed.setdefault(path, set()).update((source, bucket) for _, bucket in entries)
        usable = [path for path in proposed if {*path} <= {*range(5)} and len(path) <= depth]
        kept = dict(nodes_of(tree, row))
        assert kept.keys() <= {*usable} and len(kept) == min(max_nodes, len(usable))
        assert kept == {path: proposed[path] for path in kept}
        first = [*kept][: max_nodes // 2]
        ranks = {
            path: [first.index(path[:end]) for end in range(1, 1 + len(path))] for path in first
        }
        assert [path for path, _ in nodes_of(cut, row)] == sorted(first, key=ranks.__getitem__)


def nodes_of(tree: DraftTree, row: int) -> list[tuple[tuple[int, ...], set[tuple[int, int]]]]:
    """The path to each node of a row, and the sources and buckets of its evidence."""
    evidence = tree.evidence
    assert evidence is not None
    entries = [*zip(evidence.source.tolist(), evidence.bucket.tolist(), strict=True)]
    bounds = evidence.offsets[tree.row_offsets[row] : tree.row_offsets[row + 1] + 1].tolist()
    own = [{*entries[begin:end]} for begin, end in pairwise(bounds)]
    return [*zip(map(tuple, paths(tree, row)), own, strict=True)]

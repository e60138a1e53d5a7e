"""Merging the sources' trees and cutting the result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.draft import ROOT, DraftTree
from lookahead_hf.drafting import _numba
from lookahead_hf.drafting.ensemble import head, likeliest_chain, merge
from lookahead_hf.drafting.rates import Calibration
from tests.helpers.drafts import Fixed
from tests.oracles import drafting as oracle

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


def _assert_same_tree(one: DraftTree, other: DraftTree) -> None:
    for name in ("row_offsets", "token_ids", "parents", "depth", "score", "drawn"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.evidence is not None and other.evidence is not None
    for name in ("offsets", "source", "bucket"):
        left, right = getattr(one.evidence, name), getattr(other.evidence, name)
        np.testing.assert_array_equal(left, right, err_msg=name)


@settings(max_examples=150, deadline=None)
@given(trees=proposals(), max_nodes=st.integers(0, 20), depth=st.integers(0, 6), seed=st.integers())
def test_compiled_and_plain_functions_build_the_same_tree(
    trees: list[DraftTree], max_nodes: int, depth: int, seed: int
) -> None:
    rng = np.random.default_rng(abs(seed))
    # Few distinct rates, so that ties occur.
    sources = [Fixed(*rng.choice([0.0, 0.25, 0.5, 0.9, 1.0], NUM_BUCKETS)) for _ in trees]
    calibration = Calibration(sources)
    max_depth = np.full(trees[0].num_rows, depth)
    built = []
    for functions in (_numba, oracle):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("merge_trees", "head_order"):
                patch.setattr(_numba, name, getattr(functions, name))
            tree = merge(trees, calibration, max_nodes, vocab_size=5, max_depth=max_depth)
            built.append((tree, head(tree, max_nodes // 2)))
    for one, other in zip(*built, strict=True):
        _assert_same_tree(one, other)
    if built[0][0].drawn is None:
        _assert_ordered(built[0][0], max_nodes)


def _assert_ordered(tree: DraftTree, max_nodes: int) -> None:
    """The likeliest nodes come first, none twice, and siblings share their parent's chance."""
    for row in range(tree.num_rows):
        nodes = tree.row(row)
        parents, score = tree.parents[nodes], tree.score[nodes]
        assert len(score) <= max_nodes and (np.diff(score) <= 0).all()
        assert (parents < np.arange(len(parents))).all()
        pairs = zip(parents.tolist(), tree.token_ids[nodes].tolist(), strict=True)
        assert len(set(pairs)) == len(parents)
        for parent in set(parents.tolist()):
            above = 1.0 if parent == ROOT else score[parent]
            assert score[parents == parent].sum() <= above * 1.0001

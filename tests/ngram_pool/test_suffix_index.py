"""The suffix index: hand cases, the oracle, borders, growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.ngram_pool import SuffixIndexes
from lookahead_hf.ngram_pool.matches import BORDER, NUM_BUCKETS, level_of
from tests.helpers.ngrams import EVEN, assert_same_tree
from tests.oracles import suffix_index as oracle


class SuffixIndex(SuffixIndexes):
    """The index of a single row."""

    def __init__(self) -> None:
        super().__init__(1)

    def add(self, text: Sequence[int] | np.ndarray) -> None:
        self.extend(np.array([0, len(text)]), text)

    def tree(self, rates: np.ndarray, max_nodes: int) -> oracle.Continuations:
        offsets, *fields, score, bucket = self.grow(rates, max_nodes, np.ones(1, bool))
        assert offsets.tolist() == [0, len(score)]
        return oracle.Continuations(score, *fields, bucket)


def build(*texts: Any) -> SuffixIndex:
    """An index of the last text, with a border behind each of the others."""
    index = SuffixIndex()
    for text in texts[:-1]:
        index.add([*text, BORDER])
    index.add(texts[-1])
    return index


def test_the_longest_match_decides_about_a_token() -> None:
    # 3 followed "1 2" once and "9 1 2" once, 4 followed "1 2" twice.
    text = [9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2, 4, 9, 1, 2]
    tree = build(text).tree(EVEN, 64)
    buckets = dict(zip(tree.token_ids[:2].tolist(), tree.bucket[:2].tolist(), strict=True))
    # One match of three tokens; two of the three that have two tokens or more.
    assert buckets == {
        3: oracle.bucket_of(level_of(3), 1, 1),
        4: oracle.bucket_of(level_of(2), 2, 3),
    }
    assert tree.parents[:3].tolist() == [-1, -1, 0]


alphabets = st.sampled_from((2, 3, 5, 9))
streams = alphabets.flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=150))


@settings(deadline=None, max_examples=150)
@given(
    text=streams,
    other=streams,
    cuts=st.lists(st.integers(0, 150), max_size=4),
    max_nodes=st.sampled_from((1, 7, 64)),
    seed=st.integers(0, 2**16),
)
def test_equals_the_oracle(
    text: list[int], other: list[int], cuts: list[int], max_nodes: int, seed: int
) -> None:
    rates = np.random.default_rng(seed).random(NUM_BUCKETS).astype(np.float32)
    index, twin = SuffixIndex(), oracle.SuffixIndex()
    index.add([*other, BORDER])
    twin.extend([*other, BORDER])
    pieces = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, stop in zip(pieces, pieces[1:], strict=False):
        index.add(text[start:stop])
        twin.extend(text[start:stop])
        assert_same_tree(index.tree(rates, max_nodes), twin.grow(rates, max_nodes))
    assert index.length(0) == len(other) + 1 + len(text)


def test_a_long_text_in_many_pieces_equals_one_insertion() -> None:
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 20_000) % 3_000
    whole, grown = SuffixIndex(), SuffixIndex()
    whole.add(text)
    for piece in np.array_split(text, 997):
        grown.add(piece)
    tree = grown.tree(EVEN, 64)
    assert len(tree.token_ids) == 64
    assert_same_tree(tree, whole.tree(EVEN, 64))
    for index in (grown, whole):
        assert sum(array.nbytes for array in index._arrays[0]) <= 64 * len(text)


def test_any_integer_array_may_be_indexed() -> None:
    text = np.array([5, 6, 7, 5, 6], np.int64)
    read_only = text.copy()
    read_only.setflags(write=False)
    for ids in (text, text.astype(np.int32), np.repeat(text, 2)[::2], read_only, text.tolist()):
        assert build(ids).tree(EVEN, 1).token_ids.tolist() == [7]

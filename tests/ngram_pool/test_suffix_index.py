"""The suffix index: hand cases, the oracle, borders, growth, compilation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.ngram_pool import SuffixIndex
from lookahead_hf.ngram_pool.matches import LEVELS, NUM_BUCKETS
from tests.helpers.ngrams import EVEN, assert_same_tree, paths, roots
from tests.oracles import suffix_index as oracle


def build(text: list[int], references: tuple[list[int], ...] = (), **options: int) -> SuffixIndex:
    index = SuffixIndex(**options)
    for other in references:
        index.add_reference(other)
    index.extend(text)
    return index


def rates_by_length() -> np.ndarray:
    """Rates that rise with the match length and the share."""
    rates = np.empty((len(LEVELS), 4, 3), np.float32)
    rates[:] = np.linspace(0.2, 0.9, len(LEVELS))[:, None, None]
    return (rates * np.array([0.1, 0.3, 0.6, 1.0])[:, None]).ravel()


def test_a_copy_is_followed_past_its_own_beginning() -> None:
    tree = build([5, 6, 7, 8, 5, 6]).grow(rates_by_length(), 6, min_score=0.0)
    assert paths(tree)[0] == [7]
    assert [7, 8, 5, 6, 7, 8] in paths(tree)
    assert tree.match_len[0] == 2
    assert tree.depth.tolist() == [len(path) for path in paths(tree)]


def test_the_longest_match_decides_about_a_token() -> None:
    # 3 followed "1 2" once and "9 1 2" once, 4 followed "1 2" twice.
    text = [9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2, 4, 9, 1, 2]
    assert roots(build(text).grow(EVEN, 64)) == {3: (3, 1, 1), 4: (2, 2, 3)}


def test_matches_do_not_cross_a_border() -> None:
    index = build([7, 8, 1], references=([1, 2, 3], [4, 7, 8]))
    tree = index.grow(EVEN, 8)
    assert paths(tree) == [[2], [2, 3]]
    assert len(index) == 3
    assert tree.match_len[0] == 1
    # The match of "7 8" ends where the second reference does; "8" continues in the text.
    assert paths(build([7, 8], references=([7, 8],)).grow(EVEN, 8)) == []


def test_references_come_first() -> None:
    with pytest.raises(ValueError, match="references come first"):
        build([1]).add_reference([2])


@pytest.mark.parametrize("limits", [(0, 8), (5, 4), (1, 33)])
def test_senseless_limits_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"1 <= min_ngram <= max_ngram <= 32"):
        SuffixIndex(*limits)


alphabets = st.sampled_from((2, 3, 5, 9))
streams = alphabets.flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=150))


@settings(deadline=None, max_examples=150)
@given(
    text=streams,
    other=streams,
    cuts=st.lists(st.integers(0, 150), max_size=4),
    limits=st.sampled_from(((1, 32), (1, 6), (2, 8), (3, 3), (1, 1), (5, 20))),
    max_nodes=st.sampled_from((1, 7, 64)),
    seed=st.integers(0, 2**16),
)
def test_equals_the_oracle(
    text: list[int],
    other: list[int],
    cuts: list[int],
    limits: tuple[int, int],
    max_nodes: int,
    seed: int,
) -> None:
    rates = np.random.default_rng(seed).random(NUM_BUCKETS).astype(np.float32)
    index, twin = SuffixIndex(*limits), oracle.SuffixIndex(*limits)
    for each in (index, twin):
        each.add_reference(other)
    pieces = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, stop in zip(pieces, pieces[1:], strict=False):
        index.extend(text[start:stop])
        twin.extend(text[start:stop])
        assert_same_tree(index.grow(rates, max_nodes), twin.grow(rates, max_nodes))
    assert len(index) == len(twin) == len(text)


def test_a_long_text_in_many_pieces_equals_one_insertion() -> None:
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 20_000) % 3_000
    whole, grown = SuffixIndex(), SuffixIndex()
    whole.extend(text)
    for piece in np.array_split(text, 997):
        grown.extend(piece)
    tree = grown.grow(EVEN, 64)
    assert len(tree.token_ids) == 64
    assert_same_tree(tree, whole.grow(EVEN, 64))
    assert grown.nbytes <= 64 * len(text)
    assert whole.nbytes <= 64 * len(text)


def test_any_integer_array_may_be_indexed() -> None:
    text = np.array([5, 6, 7, 5, 6], np.int64)
    read_only = text.copy()
    read_only.setflags(write=False)
    for ids in (text, text.astype(np.int32), np.repeat(text, 2)[::2], read_only, text.tolist()):
        assert build(ids).grow(EVEN, 1).token_ids.tolist() == [7]

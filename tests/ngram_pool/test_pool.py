"""The pool: hand cases, the oracle, eviction, merging, threads, bad arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.matches import NUM_BUCKETS
from lookahead_hf.ngram_pool.store import MOST_TOKENS
from tests.helpers.compiled import in_threads
from tests.helpers.ngrams import EVEN, assert_same_tree, match_lengths, paths, pool_of
from tests.oracles import pool as oracle


def assert_same_content(got: NgramPool, want: NgramPool) -> None:
    assert got.info == want.info
    for name, array in want._contents.arrays().items():
        np.testing.assert_array_equal(got._contents.arrays()[name], array, err_msg=name)


def random_texts(num_texts: int, length: int, vocabulary: int, seed: int = 0) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    for _ in range(num_texts):
        yield rng.zipf(1.3, length) % vocabulary


def test_what_followed_in_another_text_is_found() -> None:
    pool = pool_of([5, 6, 7, 8], [1, 2, 3])
    tree = pool.grow([9, 5, 6], EVEN, 8)
    assert paths(tree) == [[7], [7, 8]]
    assert match_lengths(tree) == [2, 3]
    assert tree.depth.tolist() == [1, 2]
    assert len(pool) == 7
    assert pool.info.num_texts == 2


def test_no_match_goes_from_one_text_into_the_next() -> None:
    pool = pool_of([1, 2], [3, 4])
    assert paths(pool.grow([1], EVEN, 8)) == [[2]]
    assert paths(pool.grow([2], EVEN, 8)) == []
    assert paths(pool.grow([2, 3], EVEN, 8)) == [[4]]
    assert match_lengths(pool.grow([2, 3], EVEN, 8)) == [1]


alphabets = st.sampled_from((2, 3, 5, 9))
texts = alphabets.flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=60), max_size=6)
)


@settings(deadline=None, max_examples=200)
@given(
    texts=texts,
    cut=st.integers(0, 60),
    max_tokens=st.sampled_from((1, 2, 5, 9, 17, 40, 100, 1000)),
    limits=st.sampled_from(((1, 32), (1, 6), (2, 8), (3, 3), (1, 1), (5, 20))),
    max_nodes=st.sampled_from((1, 7, 64)),
    seed=st.integers(0, 2**16),
)
def test_equals_the_oracle(
    texts: list[list[int]],
    cut: int,
    max_tokens: int,
    limits: tuple[int, int],
    max_nodes: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.random(NUM_BUCKETS)
    pool, twin = NgramPool(max_tokens), oracle.NgramPool(max_tokens)
    for text in texts:
        pool.add(text)
        if text:
            twin.add(text)
        context = text[:cut] if cut else rng.integers(0, 9, 10).tolist()
        options = {"min_ngram": limits[0], "max_ngram": limits[1]}
        want = twin.grow(context, rates, max_nodes, **options)
        assert_same_tree(pool.grow(context, rates, max_nodes, **options), want)
    assert len(pool) == len(twin)


def test_equals_the_oracle_after_arrival_times_have_wrapped_around() -> None:
    max_tokens = 500
    pool, twin = NgramPool(max_tokens), oracle.NgramPool(max_tokens)
    assert 3 * (2**pool._contents.time_bits) < 200_000
    *older, newest = np.split(np.random.default_rng(1).integers(0, 4, 200_000), 200)
    for text in older:
        pool.add(text)
    for text in (older[-1], newest):
        pool.add(text)
        twin.add(text.tolist())
    rates = np.random.default_rng(2).random(NUM_BUCKETS)
    for start in range(0, 900, 30):
        context = newest[start : start + 30]
        assert_same_tree(pool.grow(context, rates, 64), twin.grow(context.tolist(), rates, 64))


def test_every_ngram_of_a_growing_pool_is_found() -> None:
    texts = list(random_texts(40, 1000, 30))
    pool = pool_of(*texts, max_tokens=100_000)
    assert len(pool) == 40_000
    assert pool._contents.num_buckets == int(40_040 * 6 / 16)
    for text in texts:
        for end in range(8, 1000, 61):
            tree = pool.grow(text[:end], EVEN, 1, min_ngram=8)
            assert match_lengths(tree)[0] >= 8


def test_the_bound_holds_and_the_oldest_leave_first() -> None:
    texts = list(random_texts(100, 99, 5_000))
    pool = pool_of(max_tokens=1_000)
    usual = [7001, 7002, 7003]
    for text in texts:
        pool.add(text)
        pool.add(usual)
        assert len(pool) <= 1_000
    nbytes = pool.info.nbytes
    for text in texts:
        pool.add(text)
        pool.add(usual)
    assert pool.info.nbytes == nbytes <= 40 * 1_000
    assert pool.grow(usual[:2], EVEN, 1).token_ids.tolist() == [7003]
    kept = [len(pool.grow(text[:9], EVEN, 1, min_ngram=8).token_ids) for text in texts]
    assert kept == [0] * (len(kept) - 9) + [1] * 9


def test_memory_is_bounded_when_no_ngram_repeats() -> None:
    text = np.random.default_rng(0).integers(0, 2**30, 60_000)
    pool = pool_of(text, max_tokens=20_000)
    assert len(pool) == 19_999
    assert pool.info.nbytes <= 40 * 20_000
    found = [len(pool.grow(text[:end], EVEN, 1).token_ids) for end in range(41_000, 60_000, 100)]
    assert np.mean(found) > 0.8


def test_merging_is_building_together() -> None:
    first, second = list(random_texts(30, 300, 900)), list(random_texts(30, 300, 900, seed=1))
    merged = pool_of(*first)
    merged.merge(pool_of(*second))
    assert_same_content(merged, pool_of(*first, *second))


def test_merging_takes_over_the_tokenizer_of_the_other_pool() -> None:
    pool = pool_of([1, 2, 3])
    pool.merge(pool_of([4, 5], vocab_size=10, tokenizer_fingerprint="X"))
    assert (pool.vocab_size, pool.tokenizer_fingerprint) == (10, "X")
    with pytest.raises(ValueError, match="token ids from 0 to 9"):
        pool.add([10])
    with pytest.raises(ValueError, match="'X' and 'Y'"):
        pool.merge(NgramPool(tokenizer_fingerprint="Y"))
    pool.merge(pool_of([6]))
    assert (len(pool), pool.tokenizer_fingerprint) == (6, "X")


def test_token_ids_beyond_the_vocabulary_are_not_merged() -> None:
    small, large = pool_of([1, 2], vocab_size=10), pool_of([1, 10])
    for one, other in ((small, large), (large, small)):
        before = one.info
        with pytest.raises(ValueError, match="token ids up to 10, but their vocabulary has 10"):
            one.merge(other)
        assert one.info == before


def test_any_integer_sequence_may_be_added() -> None:
    text = np.array([5, 6, 7], np.int64)
    read_only = text.copy()
    read_only.setflags(write=False)
    for ids in (text.tolist(), tuple(text.tolist()), text.astype(np.uint16), text[::1], read_only):
        assert pool_of(ids).grow([5, 6], EVEN, 1).token_ids.tolist() == [7]


@pytest.mark.parametrize("ids", [[0.5], [[1, 2]], [-1], [1, 100], ["a"], [2**40]])
def test_bad_token_ids_are_refused(ids: Any) -> None:
    pool = NgramPool(vocab_size=100)
    with pytest.raises(ValueError, match="token ids from 0 to 99"):
        pool.add(ids)
    assert len(pool) == 0


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": MOST_TOKENS + 1}])
def test_bad_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be an int in"):
        NgramPool(**options)
    with pytest.raises(ValueError, match="vocab_size"):
        NgramPool(vocab_size=0)


def test_threads_add_and_look_up_at_the_same_time() -> None:
    pool = NgramPool(200_000)
    # Each text repeats itself, since a table overflows where almost every n-gram is a new one.
    texts = [[np.tile(t, 4) for t in random_texts(20, 500, 2_000, seed)] for seed in range(4)]

    def work(own: list[Any]) -> None:
        for text in own:
            pool.add(text)
            for end in range(20, 2_000, 400):
                assert match_lengths(pool.grow(text[:end], EVEN, 1))[0] >= 16

    in_threads(*(partial(work, own) for own in texts))
    assert len(pool) == 160_000
    # Whole texts, in some order.
    held = np.split(pool._texts(), np.flatnonzero(pool._texts() < 0) + 1)[:-1]
    added = sorted(text.tolist() for own in texts for text in own)
    assert sorted(text[:-1].tolist() for text in held) == added

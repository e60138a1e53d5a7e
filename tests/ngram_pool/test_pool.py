"""The pool: the oracle, its bound, merging, threads, bad arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.matches import BORDER, NUM_BUCKETS
from lookahead_hf.ngram_pool.store import MOST_TOKENS
from tests.helpers.compiled import in_threads
from tests.helpers.ngrams import EVEN, assert_same_tree, held, match_lengths, paths, pool_of
from tests.oracles.suffix_index import SuffixIndex


def random_texts(num_texts: int, length: int, vocabulary: int, seed: int = 0) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    for _ in range(num_texts):
        yield rng.zipf(1.3, length) % vocabulary


def test_what_followed_in_another_text_is_found_and_no_match_leaves_its_text() -> None:
    pool = pool_of([5, 6, 7, 8], [1, 2, 3])
    tree = pool.grow([9, 5, 6], EVEN, 8)
    assert paths(tree) == [[7], [7, 8]]
    assert match_lengths(tree) == [2, 3]
    assert paths(pool.grow([8], EVEN, 8)) == []
    assert match_lengths(pool.grow([8, 1], EVEN, 1)) == [1]
    assert (len(pool), pool.info.num_texts) == (7, 2)


alphabets = st.sampled_from((2, 3, 5, 9))
texts = alphabets.flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=60), max_size=6)
)


@settings(deadline=None, max_examples=150)
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
    pool, want = NgramPool(max_tokens), []
    for text in texts:
        pool.add(text)
        new = [*text, BORDER][-max_tokens:] if text else []
        if len(want) + len(new) > max_tokens:  # the newest half stays
            kept = max(0, max_tokens // 2 - len(new))
            want = want[len(want) - kept :]
        want += new
        twin = SuffixIndex(*limits)
        twin.extend(want)
        context = text[:cut] if cut else rng.integers(0, 9, 10).tolist()
        tree = pool.grow(context, rates, max_nodes, min_ngram=limits[0], max_ngram=limits[1])
        assert_same_tree(tree, twin.grow(rates, max_nodes, context))
    assert held(pool) == want
    assert len(pool) + pool.info.num_texts == len(want)


def test_memory_is_bounded_and_every_ngram_is_found_though_none_repeats() -> None:
    text = np.random.default_rng(0).permutation(60_000)
    pool = NgramPool(20_000)
    for piece in np.split(text, 60):
        pool.add(piece)
        assert len(pool) <= 20_000
        assert pool.info.nbytes <= 55 * 20_000
        found = [match_lengths(pool.grow(piece[:end], EVEN, 1)) for end in range(50, 1_000, 90)]
        assert found == [[32]] * len(found)


def test_merging_is_building_together() -> None:
    first, second = list(random_texts(30, 300, 900)), list(random_texts(30, 300, 900, seed=1))
    merged, together = pool_of(*first), pool_of(*first, *second)
    merged.merge(pool_of(*second))
    assert held(merged) == held(together)
    assert merged.info.num_ngrams == together.info.num_ngrams
    assert_same_tree(merged.grow(second[7], EVEN, 64), together.grow(second[7], EVEN, 64))


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
    for one, other in ((pool, pool_of([10])), (pool_of([10]), pool)):
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


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": MOST_TOKENS + 1}, {"vocab_size": 0}]
)
def test_bad_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be an int in"):
        NgramPool(**options)


def test_threads_add_and_look_up_at_the_same_time() -> None:
    pool = NgramPool(200_000)
    texts = [list(random_texts(20, 2_000, 2_000, seed)) for seed in range(4)]

    def work(own: list[Any]) -> None:
        for text in own:
            pool.add(text)
            for end in range(20, 2_000, 400):
                assert match_lengths(pool.grow(text[:end], EVEN, 1))[0] >= 16

    in_threads(*(partial(work, own) for own in texts))
    # Whole texts, in some order.
    ids = np.array(held(pool))
    found = np.split(ids, np.flatnonzero(ids < 0) + 1)[:-1]
    added = sorted(text.tolist() for own in texts for text in own)
    assert sorted(text[:-1].tolist() for text in found) == added

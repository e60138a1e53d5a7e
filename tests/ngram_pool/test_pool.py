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
from lookahead_hf.ngram_pool.pool import MOST_TOKENS
from tests.helpers.compiled import in_threads
from tests.helpers.ngrams import grown, held, match_lengths, paths, pool_of
from tests.oracles.suffix_index import SuffixIndex


def random_texts(num_texts: int, length: int, vocabulary: int, seed: int = 0) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    for _ in range(num_texts):
        yield rng.zipf(1.3, length) % vocabulary


def test_what_followed_in_another_text_is_found_and_no_match_leaves_its_text() -> None:
    pool = pool_of([5, 6, 7, 8], [1, 2, 3])
    tree = grown(pool, [9, 5, 6], 8)
    assert paths(tree) == [[7], [7, 8]]
    assert match_lengths(tree) == [2, 3]
    assert paths(grown(pool, [8], 8)) == []
    assert match_lengths(grown(pool, [8, 1])) == [1]
    assert (len(pool), pool.info.num_texts) == (7, 2)


alphabets = st.sampled_from((2, 3, 5, 9))
texts = alphabets.flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=60), max_size=6)
)


@settings(deadline=None, max_examples=100)
@given(
    texts=texts,
    cut=st.integers(0, 60),
    max_tokens=st.sampled_from((2, 5, 9, 17, 40, 100, 1000)),
    max_nodes=st.sampled_from((1, 7, 64)),
    seed=st.integers(0, 2**16),
)
def test_each_half_grows_what_the_oracle_grows(
    texts: list[list[int]], cut: int, max_tokens: int, max_nodes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rates, half = rng.random(NUM_BUCKETS), max_tokens // 2
    pool, halves = NgramPool(max_tokens), [list[int]()]
    for text in texts:
        pool.add(text)
        for token in [*text, BORDER][-max_tokens:] if text else ():
            if len(halves) == 1 and len(halves[0]) == half or sum(map(len, halves)) == max_tokens:
                halves = [halves[-1], []]
            halves[-1].append(token)
        context = text[:cut] if cut else rng.integers(0, 9, 10).tolist()
        tree, first = grown(pool, context, max_nodes, rates), 0
        for tokens in reversed(halves):
            twin = SuffixIndex()
            twin.extend(tokens)
            want = twin.grow(rates, max_nodes, context)
            part = slice(first, first + len(want.score))
            assert tree.token_ids[part].tolist() == want.token_ids.tolist()
            assert tree.bucket[part].tolist() == want.bucket.tolist()
            assert tree.score[part].tolist() == want.score.tolist()
            below = np.where(want.parents < 0, -1, want.parents + first)
            assert tree.parents[part].tolist() == below.tolist()
            first = part.stop
        assert first == len(tree.score)
    assert held(pool) == sum(halves, [])


def test_memory_is_bounded_and_every_ngram_is_found_though_none_repeats() -> None:
    text = np.random.default_rng(0).permutation(60_000)
    pool = NgramPool(20_000)
    for piece in np.split(text, 60):
        pool.add(piece)
        assert len(pool) <= 20_000
        assert pool.info.nbytes <= 55 * 20_000
        found = [match_lengths(grown(pool, piece[:end])) for end in range(50, 1_000, 90)]
        # Halves may divide this text: what is before the border is not known behind it.
        assert found.count([32]) >= len(found) - 1
    assert len(pool) > 10_000


def test_merging_is_building_together() -> None:
    first, second = list(random_texts(30, 300, 900)), list(random_texts(30, 300, 900, seed=1))
    merged, together = pool_of(*first), pool_of(*first, *second)
    merged.merge(pool_of(*second))
    assert held(merged) == held(together)
    assert merged.info.num_ngrams == together.info.num_ngrams


def test_merging_takes_over_the_tokenizer_of_the_other_pool() -> None:
    pool = pool_of([1, 2, 3])
    pool.merge(pool_of([4, 5], vocab_size=10, tokenizer_fingerprint="X"))
    assert (pool.vocab_size, pool.tokenizer_fingerprint) == (10, "X")
    with pytest.raises(ValueError, match="token ids from 0 to 9"):
        pool.add([10])
    with pytest.raises(ValueError, match="'X' and 'Y'"):
        pool.merge(NgramPool(tokenizer_fingerprint="Y"))
    before = pool.info
    with pytest.raises(ValueError, match="token ids up to 10, but their vocabulary has 10"):
        pool.merge(pool_of([10]))
    assert pool.info == before


@pytest.mark.parametrize("ids", [[0.5], [[1, 2]], [-1], [1, 100], ["a"], [2**40]])
def test_bad_token_ids_are_refused(ids: Any) -> None:
    pool = NgramPool(vocab_size=100)
    with pytest.raises(ValueError, match="token ids from 0 to 99"):
        pool.add(ids)
    assert len(pool) == 0


@pytest.mark.parametrize(
    "options", [{"max_tokens": 1}, {"max_tokens": MOST_TOKENS + 1}, {"vocab_size": 0}]
)
def test_bad_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be an int in"):
        NgramPool(**options)


def test_threads_add_and_look_up_at_the_same_time() -> None:
    pool = NgramPool(400_000)
    texts = [list(random_texts(20, 2_000, 2_000, seed)) for seed in range(4)]

    def work(own: list[Any]) -> None:
        for text in own:
            pool.add(text)
            for end in range(20, 2_000, 400):
                assert match_lengths(grown(pool, text[:end]))[0] >= 16

    in_threads(*(partial(work, own) for own in texts))
    ids = np.array(held(pool))
    found = np.split(ids, np.flatnonzero(ids < 0) + 1)[:-1]
    added = sorted(text.tolist() for own in texts for text in own)
    assert sorted(text[:-1].tolist() for text in found) == added

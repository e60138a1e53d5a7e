"""What tests of n-gram indexes share: trees to compare, a text, and nonsense in a pool's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.matches import LEVELS, NUM_BUCKETS, NUM_SHARES, NUM_TOTALS
from tests.oracles.suffix_index import Continuations

EVEN = np.full(NUM_BUCKETS, 0.5)
TEXT = np.random.default_rng(0).zipf(1.3, 4_000) % 500

_FIELDS = ("token_ids", "parents", "depth", "bucket", "score")


def pool_of(*texts: Any, **options: Any) -> NgramPool:
    """A pool of these texts."""
    pool = NgramPool(**options)
    for text in texts:
        pool.add(text)
    return pool


def held(pool: NgramPool) -> list[int]:
    """The tokens of a pool and the borders between its texts, oldest first."""
    return pool._text().tolist()


def grown(pool: NgramPool, context: Any, max_nodes: int = 1, rates: Any = EVEN) -> Continuations:
    """What a pool proposes after one context."""
    offsets, *fields, score, bucket = pool.grow([context], rates, max_nodes)
    assert offsets.tolist() == [0, len(score)]
    return Continuations(score, *fields, bucket)


def paths(tree: Continuations) -> list[list[int]]:
    """Path of every node, in the tree's order."""
    found: list[list[int]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def match_lengths(tree: Continuations) -> list[int]:
    """Shortest match length of each node's bucket."""
    return [LEVELS[bucket // (NUM_SHARES * NUM_TOTALS)] for bucket in tree.bucket.tolist()]


def assert_same_tree(got: Continuations, want: Continuations) -> None:
    for field in _FIELDS:
        assert getattr(got, field).tolist() == getattr(want, field).tolist(), field


def use_files_of_nonsense(folder: Path, num_files: int) -> None:
    """Use pools whose files hold random places, tokens and entries, none of them out of range."""
    rng, path = np.random.default_rng(0), folder / "nonsense"
    for _ in range(num_files):
        num_tokens, num_slots = rng.integers(1, 3_000), rng.integers(1, 5_000)
        arrays = {
            "text": rng.integers(-1, 20, num_tokens, np.int32),
            "links": rng.integers(-1, num_tokens, (num_tokens, 4), np.int32),
            "heads": rng.integers(-1, 4 * num_tokens, num_slots, np.int32),
        }
        arrays["heads"][rng.integers(num_slots)] = -1
        said = {"format": "lookahead_hf.ngram_pool", "version": "2", "max_tokens": "3500"}
        save_file(arrays, path, {**said, "vocab_size": "20"})
        pool = NgramPool.load(path)
        for _ in range(5):
            tree = grown(pool, rng.integers(0, 20, 40), 64)
            assert ((tree.token_ids >= 0) & (tree.token_ids < 20)).all()
            assert (tree.parents < np.arange(len(tree.parents))).all()
            assert (tree.bucket < NUM_BUCKETS).all()
            pool.add(rng.integers(0, 20, 400))

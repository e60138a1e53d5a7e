"""What tests of n-gram indexes share: trees to compare, a text, and damaged pool files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ngram_pool.matches import (
    LEVELS,
    NUM_BUCKETS,
    NUM_SHARES,
    NUM_TOTALS,
    Continuations,
)

EVEN = np.full(NUM_BUCKETS, 0.5)
TEXT = np.random.default_rng(0).zipf(1.3, 4_000) % 500

_FIELDS = ("token_ids", "parents", "depth", "bucket", "score")


def pool_of(*texts: Any, **options: Any) -> NgramPool:
    """A pool of these texts."""
    pool = NgramPool(**options)
    for text in texts:
        pool.add(text)
    return pool


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


def tree_of(pool: NgramPool, end: int) -> list[list[Any]]:
    """What a pool proposes after the first `end` tokens of `TEXT`."""
    tree = pool.grow(TEXT[:end], EVEN, 32)
    return [tree.token_ids.tolist(), tree.parents.tolist(), tree.score.tolist()]


def use_damaged_files(folder: Path, num_files: int) -> None:
    """Use damaged files of a pool with room and of a full one."""
    rng = np.random.default_rng(0)
    path = folder / "damaged"
    for max_tokens in (10_000, 2_000):
        pool_of(TEXT, max_tokens=max_tokens, vocab_size=500).save(path)
        content = path.read_bytes()
        for _ in range(num_files // 2):
            path.write_bytes(_damaged(content, rng))
            _use(path, rng)


def _damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """The file with bytes of its header or data changed, or with a piece removed or overwritten."""
    changed = bytearray(content)
    header = 8 + int.from_bytes(content[:8], "little")
    kind = rng.integers(4)
    if kind == 0:
        for place in rng.integers(0, header, rng.integers(1, 4)):
            changed[place] = rng.integers(256)
    elif kind == 1:
        for place in rng.integers(header, len(content), rng.integers(1, 5_000)):
            changed[place] = rng.integers(256)
    elif kind == 2:
        start, size = rng.integers(0, len(content)), rng.integers(1, 5_000)
        del changed[start : start + size]
    else:
        start, size = rng.integers(header, len(content)), 4 * rng.integers(1, 20_000)
        value = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80", b"\x01"])
        changed[start : start + size] = value * len(changed[start : start + size])
    return bytes(changed)


def _use(path: Path, rng: np.random.Generator) -> None:
    """Look up, add and merge, unless the file is refused."""
    try:
        pool = NgramPool.load(path)
    except ValueError as error:
        assert "pool" in str(error)
        return
    for end in rng.integers(1, len(TEXT), 5):
        tree = pool.grow(TEXT[:end], EVEN, 64)
        assert ((tree.token_ids >= 0) & (tree.token_ids < 2**31)).all()
        assert (tree.parents < np.arange(len(tree.parents))).all()
        assert (tree.bucket < NUM_BUCKETS).all()
    pool.add(TEXT[:1_500] % (pool.info.vocab_size or 500))
    pool.grow(TEXT[:100], EVEN, 64)
    try:
        NgramPool(3_000).merge(pool)
    except ValueError as error:
        assert "damaged" in str(error)

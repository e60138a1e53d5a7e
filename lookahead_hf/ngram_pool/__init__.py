"""Compiled indexes that find what followed a context of token ids, without torch."""

from __future__ import annotations

from lookahead_hf.ngram_pool.compilation import (
    NumbaMissingError,
    available,
    check_available,
    compile_in_background,
    compile_now,
    compiled,
    give_way,
    ready,
    wait_until_loaded,
)
from lookahead_hf.ngram_pool.matches import Continuations
from lookahead_hf.ngram_pool.pool import NgramPool, PoolInfo
from lookahead_hf.ngram_pool.suffix_index import SuffixIndexes

__all__ = [
    "Continuations",
    "NgramPool",
    "NumbaMissingError",
    "PoolInfo",
    "SuffixIndexes",
    "available",
    "check_available",
    "compile_in_background",
    "compile_now",
    "compiled",
    "give_way",
    "ready",
    "wait_until_loaded",
]

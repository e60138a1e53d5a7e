"""What followed this context? Indexes of token ids, compiled by numba, free of torch."""

from __future__ import annotations

from lookahead_hf.ngram_pool.compilation import (
    NumbaMissingError,
    available,
    check_available,
    compile_in_background,
    compile_now,
    compiled,
    failed,
    ready,
)
from lookahead_hf.ngram_pool.pool import NgramPool, PoolInfo
from lookahead_hf.ngram_pool.suffix_index import Continuations, SuffixIndex

__all__ = [
    "Continuations",
    "NgramPool",
    "NumbaMissingError",
    "PoolInfo",
    "SuffixIndex",
    "available",
    "check_available",
    "compile_in_background",
    "compile_now",
    "compiled",
    "failed",
    "ready",
]

"""Compiled indexes that find what followed a context of token ids, without torch."""

from __future__ import annotations

from lookahead_hf.ngram_pool.compilation import NumbaMissingError
from lookahead_hf.ngram_pool.pool import NgramPool, PoolInfo
from lookahead_hf.ngram_pool.suffix_index import SuffixIndexes

__all__ = ["NgramPool", "NumbaMissingError", "PoolInfo", "SuffixIndexes"]

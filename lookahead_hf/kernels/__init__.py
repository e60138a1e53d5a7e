"""Triton kernels for CUDA and ROCm; all but attention have a twin in torch."""

from __future__ import annotations

from lookahead_hf.kernels.data import (
    MAX_ATTENTION_NODES,
    MAX_HEAD_DIM,
    PathTable,
    RowScan,
    TopKCounts,
    TopRows,
    TreeWalk,
)
from lookahead_hf.kernels.dispatch import (
    argmax,
    backend,
    compact_on_host,
    compact_path,
    is_asked_for,
    reject_tree,
    setting,
    topk_rows,
    tree_attention,
    verify_tree,
)

__all__ = [
    "MAX_ATTENTION_NODES",
    "MAX_HEAD_DIM",
    "PathTable",
    "RowScan",
    "TopKCounts",
    "TopRows",
    "TreeWalk",
    "argmax",
    "backend",
    "compact_on_host",
    "compact_path",
    "is_asked_for",
    "reject_tree",
    "setting",
    "topk_rows",
    "tree_attention",
    "verify_tree",
]

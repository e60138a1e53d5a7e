"""Triton kernels for CUDA and ROCm, each with a torch twin of the same name and signature."""

from __future__ import annotations

from lookahead_hf.kernels.dispatch import (
    MAX_ATTENTION_NODES,
    MAX_HEAD_DIM,
    backend,
    compact_path,
    is_asked_for,
    reject_tree,
    topk_rows,
    tree_attention,
    verify_tree,
)
from lookahead_hf.kernels.path_table import PathTable
from lookahead_hf.kernels.row_scan import RowScan, TopRows
from lookahead_hf.kernels.tree_walk import TreeWalk

__all__ = [
    "MAX_ATTENTION_NODES",
    "MAX_HEAD_DIM",
    "PathTable",
    "RowScan",
    "TopRows",
    "TreeWalk",
    "backend",
    "compact_path",
    "is_asked_for",
    "reject_tree",
    "topk_rows",
    "tree_attention",
    "verify_tree",
]

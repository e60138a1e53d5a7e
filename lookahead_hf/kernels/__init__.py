"""Triton kernels for CUDA and ROCm, each with a torch twin of the same name and signature."""

from __future__ import annotations

from lookahead_hf.kernels.dispatch import (
    backend,
    compact_path,
    reject_tree,
    topk_rows,
    tree_attention,
    verify_tree,
)
from lookahead_hf.kernels.path_table import PathTable
from lookahead_hf.kernels.tree_walk import TreeWalk

__all__ = [
    "PathTable",
    "TreeWalk",
    "backend",
    "compact_path",
    "reject_tree",
    "topk_rows",
    "tree_attention",
    "verify_tree",
]

"""Compiles the kernels of a call's steps in a thread, beside its prompt and its first steps.

The functions that launch kernels run there on tensors without memory, which only compiles.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lookahead_hf.kernels import _launch, attention, compact, topk, verify
from lookahead_hf.kernels.data import PathTable, Wanted

BEST_TOKENS, FEW_TOKENS = 48, 12
"""Best tokens that recycling asks for at the end of a path, and at other nodes."""

_known: set[str] = set()
_logger = logging.getLogger(__name__)


def compile_beside(device: torch.device, steps: Callable[[], object]) -> None:
    """Run `steps` in a thread to compile their kernels, once for steps of a kind.

    It raises nothing: what fails here is compiled by the first launch. A process ends as soon as
    the kernel is compiled that the thread has begun.
    """
    if (kind := f"{device} {steps}") in _known:
        return
    _known.add(kind)

    def run() -> None:
        try:
            with _launch.using(device):
                steps()
        except Exception as error:
            _logger.info("kernels are compiled when they are first launched: %s", error)
        finally:
            _launch.threads.discard(thread)

    thread = threading.Thread(target=run, name="lookahead_hf kernels")
    _launch.threads.add(thread)
    thread.start()


def compile_steps(
    rows: int,
    widths: tuple[int, ...],  # tokens per row
    vocab: int,
    dtype: torch.dtype,  # of the logits, K and V
    draws: bool | None,  # None where the host decides
    heads: tuple[int, int],  # of the queries, and of K and V
    dim: int,  # of a head
    windows: tuple[bool, ...],  # whether layers have one
    softcap: float = 0.0,
) -> None:
    """Compile the kernels of a call's steps, those of narrow steps first."""
    floats = partial(torch.empty, dtype=dtype, device="meta")
    integers = partial(torch.empty, dtype=torch.int64, device="meta")
    of_rows, store = integers(rows), floats(rows, 512, heads[1], dim)
    limits: dict[str, Any] = {"window": 1, "columns": integers(rows, 512), "pads": of_rows}
    for width in sorted(widths):
        block, logits = integers(rows, width), floats(rows, width, vocab)
        q, kv = floats(rows, width, heads[0], dim).transpose(1, 2), store.transpose(1, 2)
        for window in windows:
            given = (limits if window else {}) | {"softcap": softcap}
            attention.tree_attention(q, kv, kv, of_rows, block, 1.0, **given)
        if draws is None:
            continue
        if draws:
            noise = floats(rows, 1, vocab).float(), block
            walk = verify.verify_tree(logits.float(), block, block, of_rows, *noise)
        else:
            walk = verify.verify_tree(logits, block, block, of_rows, keep_scan=True)
        if width > 1:
            compact.compact_path(PathTable([store]), of_rows, walk.path, of_rows)
        wanted = Wanted(walk.packed, of_rows, FEW_TOKENS)
        topk.topk_rows(logits.flatten(0, 1), min(BEST_TOKENS, vocab), walk.scan, wanted)

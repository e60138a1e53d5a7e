"""Compiles the kernels of a call's steps in a thread, beside its prompt and its first steps.

The functions that launch kernels run there on tensors without memory, which only compiles.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from lookahead_hf.kernels import _launch, attention, compact, topk, verify
from lookahead_hf.kernels.path_table import PathTable
from lookahead_hf.kernels.results import Wanted

BEST_TOKENS, FEW_TOKENS = 48, 12
"""Best tokens that recycling asks for at the end of a path, and at other nodes."""

_SLOTS = 512
_known: set[str] = set()
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Steps:
    """What the kernels of the steps of a call are compiled for."""

    rows: int
    widths: tuple[int, ...]  # tokens per row
    vocab: int
    dtype: torch.dtype  # of the logits, K and V
    draws: bool | None  # whether the device samples; None where the host decides
    heads: tuple[int, int]  # of the queries, and of K and V
    dim: int  # of a head
    windows: tuple[bool, ...]  # whether layers have one
    softcap: float = 0.0

    def compile(self) -> None:
        """Compile the kernels, those of narrow steps first."""
        for width in sorted(self.widths):
            for window in self.windows:
                self._attend(width, window)
            if self.draws is not None:
                self._verify(width)

    def _attend(self, width: int, window: bool) -> None:
        q = _empty(self.rows, width, self.heads[0], self.dim, dtype=self.dtype).transpose(1, 2)
        kv = self._store().transpose(1, 2)
        lengths, words = _empty(self.rows), _empty(self.rows, width)
        given: dict[str, Any] = {"softcap": self.softcap}
        if window:
            given |= {"window": 1, "columns": _empty(self.rows, _SLOTS), "pads": lengths}
        attention.tree_attention(q, kv, kv, lengths, words, scale=1.0, **given)

    def _verify(self, width: int) -> None:
        block, of_rows = _empty(self.rows, width), _empty(self.rows)
        logits = _empty(self.rows, width, self.vocab, dtype=self.dtype)
        if self.draws:
            noise = _empty(self.rows, 1, self.vocab, dtype=torch.float32)
            tree = logits.float(), block, block, of_rows, noise, block
            walk = verify.verify_tree(*tree)
        else:
            walk = verify.verify_tree(logits, block, block, of_rows, keep_scan=True)
        if width > 1:
            compact.compact_path(PathTable([self._store()]), of_rows, walk.path, of_rows)
        wanted = Wanted(walk.packed, of_rows, FEW_TOKENS)
        topk.topk_rows(logits.flatten(0, 1), min(BEST_TOKENS, self.vocab), walk.scan, wanted)

    def _store(self) -> torch.Tensor:
        return _empty(self.rows, _SLOTS, self.heads[1], self.dim, dtype=self.dtype)


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_beside(device: torch.device, steps: Steps) -> None:
    """Compile the kernels of a call's steps in a thread, once for all calls of a kind.

    It raises nothing: what fails here is compiled by the first launch. A process ends as soon as
    the kernel is compiled that the thread has begun.
    """
    if (kind := f"{device} {steps}") in _known:
        return
    _known.add(kind)

    def run() -> None:
        try:
            with _launch.using(device):
                steps.compile()
        except Exception as error:
            _logger.info("kernels are compiled when they are first launched: %s", error)
        finally:
            _launch.threads.discard(thread)

    thread = threading.Thread(target=run, name="lookahead_hf kernels")
    _launch.threads.add(thread)
    thread.start()

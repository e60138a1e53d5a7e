"""What holds in one forward of ours, on the thread that runs it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lookahead_hf.patches import lazy_mask
from lookahead_hf.patches.install import SharedChange

if TYPE_CHECKING:
    from lookahead_hf.patches.implicit_positions import Columns
    from lookahead_hf.patches.tree_attention import BlockTree
    from lookahead_hf.runner.flat import FlatBlock


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What the patches of a model read in one forward of ours.

    Attributes:
        trees: Masks of the forward that the kernel can do without.
        flat: How the tokens of a flat block belong to the rows of the cache.
        columns: Places of the tokens in the text; None for a model that gets positions.
        mixers: Forwards of the mixers, by the id of the mixer.
        by_kernel: Counts attentions by whether the kernel did them, if it attends wherever it can;
            None if it attends only where it is faster.
        made: What the layers of this forward have made for each other.
    """

    trees: Sequence[BlockTree] = ()
    flat: FlatBlock | None = None
    columns: Columns | None = None
    mixers: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    by_kernel: Counter[bool] | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    def tree(self, mask: torch.Tensor | None) -> BlockTree | None:
        """Return the tree of this very mask; a copy that the model made may say something else."""
        if mask is None:
            return None
        same = (tree for tree in self.trees if tree.mask is mask)
        made = (tree for tree in self.trees if lazy_mask.made(tree.mask) is mask)
        return next(same, None) or next(made, None)


class _OfThread(threading.local):
    context: ForwardContext | None = None
    by_kernel: Counter[bool] | None = None


_thread = _OfThread()


def current() -> ForwardContext | None:
    """Return the context of the forward of ours that runs on this thread, None outside of one."""
    return _thread.context


@contextmanager
def running(context: ForwardContext, device: torch.device) -> Iterator[None]:
    """Run a forward of ours inside, on this thread.

    On CUDA, cuDNN stays out of it: it builds a plan for every new length of the cache.
    """
    outer = _thread.context
    if _thread.by_kernel is not None:
        context = replace(context, by_kernel=_thread.by_kernel)
    _thread.context = context
    try:
        if device.type == "cuda":
            with without_cudnn():
                yield
        else:
            yield
    finally:
        _thread.context = outer


@contextmanager
def left_to_kernel(always: bool = True) -> Iterator[Counter[bool]]:
    """Leave attention to the kernel wherever it can attend, on this thread, if `always`.

    Yields:
        How many attentions in our forwards were the kernel's, and how many not.
    """
    outer, counts = _thread.by_kernel, Counter[bool]()
    _thread.by_kernel = counts if always else None
    try:
        yield counts
    finally:
        _thread.by_kernel = outer


_without_cudnn_users: set[object] = set()
_cudnn_before: list[bool] = []  # at most one


def without_cudnn() -> SharedChange:
    """Return a context that keeps cuDNN out of attention; the whole process has one switch."""

    def switch_off() -> None:
        if not _cudnn_before:
            _cudnn_before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)

    def switch_back() -> None:
        if _cudnn_before:
            torch.backends.cuda.enable_cudnn_sdp(_cudnn_before[0])
            _cudnn_before.clear()

    return SharedChange(_without_cudnn_users, switch_off, switch_back)

"""What is in force in one forward of ours, on the thread that runs it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lookahead_hf.block import masks
from lookahead_hf.runner.install import shared_change

if TYPE_CHECKING:
    from lookahead_hf.block.flat import FlatBlock
    from lookahead_hf.block.layout import Columns
    from lookahead_hf.block.tree_attention import BlockTree


@dataclass(slots=True, eq=False)
class ForwardContext:
    """What the patches of a model read in one forward of ours.

    Attributes:
        trees: Masks of the forward in the kernel's format.
        flat: How the tokens of a flat block belong to the rows of the cache.
        columns: Columns of tokens and slots, for a model that derives positions from its cache.
        mixers: Forwards of the mixers, by the id of the mixer.
        by_kernel: Counts attentions by whether our kernel did them, if it attends wherever it can;
            None if it attends only where it is faster.
        layers: The step in which an engine computes layers, in the engine's own form.
        made: Results that the layers of this forward share.
    """

    trees: Sequence[BlockTree] = ()
    flat: FlatBlock | None = None
    columns: Columns | None = None
    mixers: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    by_kernel: Counter[bool] | None = None
    layers: Any = None
    made: dict[Any, Any] = field(default_factory=dict)

    def tree(self, mask: torch.Tensor | None) -> BlockTree | None:
        """Return the tree of this mask object; a copy that the model made may differ."""
        if mask is None:
            return None
        same = (tree for tree in self.trees if tree.mask is mask)
        made = (tree for tree in self.trees if masks.made(tree.mask) is mask)
        return next(same, None) or next(made, None)


class _OfThread(threading.local):
    context: ForwardContext | None = None


_thread = _OfThread()


def current() -> ForwardContext | None:
    """Return the context of the forward of ours that runs on this thread, None outside of one."""
    return _thread.context


@contextmanager
def running(context: ForwardContext, device: torch.device) -> Iterator[None]:
    """Run a forward of ours inside, on this thread.

    On CUDA it does without cuDNN, which builds a plan for every new length of the cache.
    """
    outer = _thread.context
    _thread.context = context
    try:
        if device.type == "cuda":
            with without_cudnn():
                yield
        else:
            yield
    finally:
        _thread.context = outer


_without_cudnn_users: set[object] = set()
_cudnn_before: list[bool] = []  # at most one


def without_cudnn() -> AbstractContextManager[None]:
    """Return a context that keeps cuDNN out of attention; the whole process has one switch."""

    def switch_off() -> None:
        if not _cudnn_before:
            _cudnn_before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)

    def switch_back() -> None:
        if _cudnn_before:
            torch.backends.cuda.enable_cudnn_sdp(_cudnn_before[0])
            _cudnn_before.clear()

    return shared_change(_without_cudnn_users, switch_off, switch_back)

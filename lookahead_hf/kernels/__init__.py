"""Triton kernels for CUDA and ROCm, or their twins in torch: the one place that chooses.

The twins in `reference.py` document the arguments; `tree_attention` has none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lookahead_hf.call import optional
from lookahead_hf.kernels import reference
from lookahead_hf.kernels.data import PathTable, TopRows, TreeWalk
from lookahead_hf.ngram_pool import compilation

_VARIABLE = "LOOKAHEAD_HF_BACKEND"


def backend(device: torch.device) -> str:
    """Return what runs on a device: "triton" on CUDA and ROCm, "torch" elsewhere.

    It is "torch" also for NVIDIA's GPUs before Ampere, which Triton does not support, and where the
    first launch fails. The environment variable LOOKAHEAD_HF_BACKEND, "triton" or "torch",
    overrides it.

    Raises:
        ValueError: The variable holds anything else, or names Triton where it cannot run.
    """
    chosen = setting()
    if not chosen:
        return "triton" if device.type == "cuda" and _has_triton(device) else "torch"
    if chosen not in ("triton", "torch"):
        raise ValueError(f"{_VARIABLE} is {chosen!r}: set it to 'triton' or 'torch', or unset it")
    if chosen == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{_VARIABLE} is 'triton', but the tensors are on the CPU: unset it, or start the "
            "process with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
        )
    return chosen


def setting() -> str:
    """Return what the environment variable asks for, "" for nothing."""
    return os.environ.get(_VARIABLE, "")


def is_asked_for() -> bool:
    """Return whether the environment variable asks for the kernels."""
    return setting() == "triton"


@lru_cache
def _has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed, supports the GPU and runs on it.

    Before its first launch Triton compiles code for the host, for which it needs a C compiler and
    Python's headers. Slim images have neither.
    """
    if find_spec("triton") is None:
        return False
    if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from lookahead_hf.kernels import _common

        _common.try_launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"Triton cannot run on {device}, so torch takes its place, which is slower: "
            f"{type(error).__name__}: {said}. Triton needs a C compiler and Python's headers",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


KERNELS: Mapping[str, tuple[str, ModuleType | None]] = {
    "verify_tree": ("tree", reference),
    "reject_tree": ("tree", reference),
    "compact_path": ("tree", reference),
    "topk_rows": ("topk", reference),
    "tree_attention": ("attention", None),
}
"""The module of each Triton kernel, and that of its twin, if there is one."""


def kernel(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the Triton kernel of that name, or its twin if torch serves the device."""
    kernels, module = KERNELS[name]
    if backend(device) == "triton":
        module = import_module(f"{__package__}.{kernels}")
    assert module is not None, "without Triton, attend under a mask"
    return getattr(module, name)


def _dispatched(name: str) -> Callable[..., Any]:
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return kernel(name, first.device)(first, *args, **kwargs)

    return call


verify_tree: Callable[..., TreeWalk] = _dispatched("verify_tree")
reject_tree: Callable[..., TreeWalk] = _dispatched("reject_tree")
topk_rows: Callable[..., TopRows] = _dispatched("topk_rows")
tree_attention: Callable[..., torch.Tensor] = _dispatched("tree_attention")


def compact_path(
    table: PathTable, lengths: torch.Tensor, path: torch.Tensor, num_kept: torch.Tensor
) -> None:
    """Keep one path of every row's draft tree in the cache: move its tokens together, in place.

    For `i < num_kept[row]`, the token in slot `lengths[row] + path[row, i]` of every tensor moves
    to slot `lengths[row] + i`. A token whose slot stays the same keeps its value.

    Args:
        table: Keys and values of the layers, [batch, slot, ...] each.
        lengths: Slots of each row before node 0, [rows] integers.
        path: Node numbers as in `TreeWalk.path`, ascending, [rows, any] integers.
        num_kept: Entries of `path` that count, [rows] integers.
    """
    for part in table.by_device:
        device = part.tensors[0].device
        local = [tensor.to(device, non_blocking=True) for tensor in (lengths, path, num_kept)]
        kernel("compact_path", device)(part, *local)


def compact_on_host(
    table: PathTable, lengths: np.ndarray, path: np.ndarray, num_kept: np.ndarray
) -> None:
    """Keep one path as `compact_path` does, given arrays of int64 on the host.

    On a CPU a compiled loop moves the tokens: for 60 tensors torch takes 0.6 ms.
    """
    compiled = optional.find("cpu kernels")  # first, since it says what there is to load
    is_ready = compilation.common.is_loaded()
    for part in table.by_device:
        device = part.tensors[0].device
        is_served = device.type == "cpu" and part.word_bytes == 4
        if compiled is not None and is_ready and is_served and backend(device) == "torch":
            compiled.compact_path(part, lengths, path, num_kept)
        else:
            compact_path(part, *map(torch.from_numpy, (lengths, path, num_kept)))


def argmax(scores: torch.Tensor) -> int:
    """Return the index of the first largest of some scores, [vocab], as `torch.argmax`.

    On a CPU torch takes 60 us for 49,152 scores in float32 and 180 us in bfloat16.
    """
    if scores.device.type != "cpu":
        return int(scores.argmax())
    compiled = optional.find("cpu kernels")
    if compiled is not None and compiled.is_ready(scores.dtype) and scores.is_contiguous():
        return int(compiled.argmax(scores))
    return int(scores.float().numpy().argmax())

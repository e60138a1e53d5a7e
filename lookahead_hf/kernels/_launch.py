"""Launches kernels, or compiles them in one thread for the launches of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_FP_FUSION = True
"""Given in every launch: Triton 3.9 warns without it, and 3.10 has the other default."""

threads: set[threading.Thread] = set()
"""Threads that compile kernels ahead of their launches."""

_begun: dict[tuple[Any, ...], threading.Event] = {}
"""By variant of a kernel: set when the thread that needed it first has compiled it."""


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, **arguments: Any) -> None:
    """Launch a kernel on the device of a tensor, or compile it if the tensor has no memory."""
    arguments["enable_fp_fusion"] = _FP_FUSION
    with using(on.device), _in_turn(kernel, arguments) if threads else nullcontext():
        if not on.is_meta:
            kernel[grid](**arguments)
        elif threading.main_thread().is_alive():  # otherwise the process waits for this thread
            kernel.warmup(grid=grid, **arguments)


def using(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current, on which Triton launches and for which it compiles."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that a launch is for, the current one for tensors without memory."""
    if tensor.is_meta and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


@contextmanager
def _in_turn(kernel: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Let the first thread that needs a variant compile it; others wait for this one alone."""
    types = [value.dtype for value in arguments.values() if isinstance(value, torch.Tensor)]
    sizes = [value for name, value in arguments.items() if name.isupper() or name == "num_warps"]
    ended = threading.Event()
    first = _begun.setdefault((id(kernel), *types, *sizes), ended)
    if first is not ended:
        first.wait()
    try:
        yield
    finally:
        ended.set()

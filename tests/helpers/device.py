"""The device engine on CPU tensors, and a stand-in for CUDA graphs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lookahead_hf.runner.cuda import graphs
from lookahead_hf.runner.cuda.capture import Captured
from lookahead_hf.verification import device

READS = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    }
)
"""Operations that wait for a device to know what comes next."""


def storages(values: Any) -> set[int]:
    leaves = tree_leaves(values)
    return {t.untyped_storage()._cdata for t in leaves if isinstance(t, torch.Tensor)}


class Tape(TorchDispatchMode):
    """Records operations with their very tensors and repeats them, as a CUDA graph does.

    What Python computed while recording is frozen; every tensor keeps its address, and repeating
    fills it anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any, set[int]]] = []
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in READS:
            self.reads.append(str(func))
        fresh = storages(out) - storages((args, kwargs))
        if fresh or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, out, fresh))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out, fresh in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if not isinstance(old, torch.Tensor):
                    assert old is new or old == new, f"{func} gives another number: {old}, {new}"
                elif old.untyped_storage()._cdata in fresh:
                    assert old.shape == new.shape, f"{func} gives another shape"
                    old.copy_(new)


class HostReads(TorchFunctionMode):
    """Notes reads of CPU memory that are no operation; on a device they wait, too."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            self.reads.append(func.__name__)
        return func(*args, **(kwargs or {}))


class TapeRecording:
    """A step on tape."""

    def __init__(self, run: Callable[[], Captured]) -> None:
        self.num_replays = 0
        self.tape = Tape()
        with self.tape:
            self.outputs = run()

    def replay(self) -> None:
        self.num_replays += 1
        self.tape.replay()


class TapeRecorder:
    """Takes the place of `CudaRecorder` on the CPU."""

    def __init__(self) -> None:
        self.recordings: list[TapeRecording] = []
        self.released = 0
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def try_out(self, run: Callable[[], Captured]) -> str | None:
        run()
        with HostReads() as host, Tape() as tape:
            run()
        reads = tape.reads + host.reads
        return reads[0] if reads else None

    def record(self, run: Callable[[], Captured]) -> TapeRecording:
        self.recordings.append(TapeRecording(run))
        return self.recordings[-1]

    def release(self, recordings: list[Any]) -> None:
        self.released += len(recordings)


@contextmanager
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Verify calls on the CPU as on CUDA."""
    with monkeypatch.context() as patch:
        patch.setattr(device, "serves", lambda _: True)
        yield


@contextmanager
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapeRecorder]]:
    """Do the same with tapes for graphs; yield their recorders, one per call that asks for one."""
    made: list[TapeRecorder] = []

    def recorder(_: torch.device) -> TapeRecorder:
        made.append(TapeRecorder())
        return made[-1]

    with on_device(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(graphs, "recorder_for", recorder)
        yield made

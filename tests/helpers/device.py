"""The device engine on CPU tensors, and a stand-in for CUDA graphs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lookahead_hf.engines.cuda import graphs, step
from lookahead_hf.engines.cuda.capture import Captured
from lookahead_hf.runner import outputs
from lookahead_hf.verification import node_processors, noise, rejection, select

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

    @torch.no_grad()
    def poison(self) -> None:
        """Overwrite everything that was made on the tape."""
        for *_, out, fresh in self.calls:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in fresh:
                    poison(tensor)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with numbers that nobody expects."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


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

    def __init__(self, run: Callable[[], Captured], others: list[TapeRecording]) -> None:
        self.num_replays = 0
        self._others = others
        self.tape = Tape()
        with self.tape:
            self.outputs = run()

    def replay(self) -> None:
        """Run the step again, in memory that all recordings of a set share."""
        for other in self._others:
            if other is not self:
                other.tape.poison()
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
        self.recordings.append(TapeRecording(run, self.recordings))
        return self.recordings[-1]

    def release(self, recordings: list[Any]) -> None:
        self.released += len(recordings)


class Arrival:
    """A copy to the host, which nobody may read before it was waited for."""

    def __init__(self, data: torch.Tensor) -> None:
        self._sent, self.host = data.clone(), torch.empty_like(data)
        poison(self.host)

    def synchronize(self) -> None:
        self.host.copy_(self._sent)


def brought(data: torch.Tensor) -> tuple[torch.Tensor, Arrival]:
    """What `outputs._start_copy` returns on a device, whose copies take their time."""
    arrival = Arrival(data)
    return arrival.host, arrival


def taken_along(array: np.ndarray, _: torch.device) -> torch.Tensor:
    """What `pinned` returns, after which the host's own array means nothing."""
    source = torch.from_numpy(array.copy())
    poison(torch.from_numpy(array))
    return source


@contextmanager
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Verify calls on the CPU as on CUDA, with copies that do not wait."""
    with monkeypatch.context() as patch:
        patch.setattr(select, "serves", lambda _: True)
        patch.setattr(outputs, "_start_copy", brought)
        for user in (step, noise, node_processors, rejection):
            patch.setattr(user, "pinned", taken_along)
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

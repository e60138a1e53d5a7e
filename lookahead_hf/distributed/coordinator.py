"""Who decides in a call: this process alone, each of several for its rows, or one for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed

from lookahead_hf import compat
from lookahead_hf.distributed import message, sharding
from lookahead_hf.distributed.message import Told
from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.rows import Rows


class Alone:
    """One process, which waits for nobody.

    Attributes:
        decides: Whether this process drafts and decides.
        is_alone: Whether a forward needs no other process.
        runs_same: Whether all processes run the same rows, and so the same forwards.
        told: Gives what another process decided, None where this one does.
    """

    decides = True
    is_alone = True
    runs_same = False
    told: Callable[[], Told] | None = None

    def step(self) -> None:
        """A forward comes: say so to those who wait for it."""

    def others_go_on(self) -> bool:
        """Whether this process, whose texts have ended, must run a forward for others."""
        return False

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        """The draft of a step: `propose()` where this process decides."""
        return propose()

    def ready(self) -> None:
        """The logits of a step are there: from now on others wait for a verdict."""

    def decided(self, rows: Rows, verdict: Verdict) -> None:
        """The verdict of a step is there, and its tokens are in `rows`."""

    def broke_off(self) -> None:
        """The call failed here."""


class InStep(Alone):
    """Processes with rows of their own that share the weights: all run equally many forwards.

    The signs that go round are plain's own, one before every forward behind the prefill, so that
    processes of one group may decode plainly and speculatively side by side.
    """

    is_alone = False

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device

    def step(self) -> None:
        compat.are_unfinished(self._model, False, self._device)

    def others_go_on(self) -> bool:
        return compat.are_unfinished(self._model, True, self._device)


class _Shared(Alone):
    """Processes that hold parts of each matrix: one drafts and decides, the others are told.

    What clocks and memories say differs between processes, and logits may in their last bits. One
    broadcast a step carries the verdict and the draft of the step after it.
    """

    is_alone = False
    runs_same = True

    def __init__(self, group: Any, device: torch.device, num_rows: int, most_nodes: int) -> None:
        self._group, self._device = group, device
        self._source = distributed.get_global_rank(group, 0)
        self._sizes = num_rows, most_nodes

    def _broadcast(self, numbers: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(numbers).to(self._device)
        distributed.broadcast(tensor, self._source, group=self._group)
        return tensor


class Leader(_Shared):
    """The process that decides."""

    _waited_for = False
    _last: tuple[Rows, Verdict] | None = None

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        draft = propose()
        assert self._last is not None
        self._tell(*self._last, draft)
        return draft

    def ready(self) -> None:
        self._waited_for = True

    def decided(self, rows: Rows, verdict: Verdict) -> None:
        self._last = rows, verdict
        if not rows.live.any():
            self._tell(rows, verdict, DraftTree.empty(rows.num_rows))

    def broke_off(self) -> None:
        if self._waited_for:
            self._send(message.broken_off(*self._sizes))

    def _tell(self, rows: Rows, verdict: Verdict, draft: DraftTree) -> None:
        self._send(message.packed(rows, verdict, draft, self._sizes[1]))

    def _send(self, numbers: np.ndarray) -> None:
        self._waited_for = False
        self._broadcast(numbers)


class Follower(_Shared):
    """A process that is told what to draft and what to emit."""

    decides = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._draft: DraftTree | None = None
        self.told = self._receive

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        assert self._draft is not None
        return self._draft

    def _receive(self) -> Told:
        room = np.zeros(message.shape(*self._sizes), np.int32)
        told = message.unpacked(self._broadcast(room).to("cpu").numpy())
        if told is None:
            raise RuntimeError(
                f"process {self._source}, which decides for all that share this model's matrices, "
                "broke the call off: its own error says why"
            )
        self._draft = told.draft
        return told


def of_call(
    model: Any,
    device: torch.device,
    num_rows: int,
    most_nodes: int,
    *,
    synced: bool,
    draws: bool,
    assistant: Any = None,
) -> Alone:
    """Find out who decides in a call.

    Args:
        model: The target.
        device: Where the tokens are.
        num_rows: Rows of the call.
        most_nodes: Most nodes that a row's draft can have.
        synced: Whether processes must run equally many forwards, as `generate` computes it.
        draws: Whether verification draws random numbers that depend on the draft.
        assistant: A model that drafts.

    Raises:
        Unserved: The model or the assistant lies over processes in a way that is not served.
    """
    group = sharding.tensor_group(model)
    if group is None and not synced:
        if sharding.is_sharded(model):
            raise Unserved(FallbackReason.SYNCED_GPUS, type(model).__name__)
        return Alone()
    if assistant is not None and sharding.is_spread(assistant):
        detail, fix = "an assistant that is spread too", "give every process the whole assistant"
        raise Unserved(FallbackReason.SYNCED_GPUS, detail, fix)
    if group is None:
        return InStep(model, device)
    if synced:
        fix = "leave synced_gpus out"
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "with synced_gpus=True", fix)
    if draws:
        detail, fix = 'with verification="rejection"', 'pass verification="exact"'
        raise Unserved(FallbackReason.TENSOR_PARALLEL, detail, fix)
    kind = Leader if distributed.get_rank(group) == 0 else Follower
    return kind(group, device, num_rows, most_nodes)

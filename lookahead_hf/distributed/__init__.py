"""Lets several processes run one call, and finds out how a model is divided among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn

from lookahead_hf.draft import DraftTree, Verdict
from lookahead_hf.fallback import FallbackReason, Unserved
from lookahead_hf.model import compat
from lookahead_hf.rows import Rows
from lookahead_hf.runner.processes import Processes, StepMessage, is_one_of_several


def check(model: Any) -> None:
    """Raise Unserved where a model is split over processes in a way that is not served."""
    if (stages := compat.num_pipeline(model)) > 1:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, f"a pipeline of {stages} processes")
    processes = compat.num_tensor_parallel(model)
    if tensor_group(model) is None and processes > 1:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, f"{processes} processes, no common mesh")


def is_spread(model: nn.Module) -> bool:
    """Return whether a forward of the model needs other processes."""
    return is_one_of_several() and (bool(_meshes(model)) or is_sharded(model))


def is_sharded(model: nn.Module) -> bool:
    """Return whether processes with rows of their own share the weights, by FSDP or ZeRO-3."""
    if not is_one_of_several():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    of_deepspeed = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return of_deepspeed or any(isinstance(module, kinds) for module in model.modules())


def tensor_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """Return the processes that hold parts of each matrix and run all rows together, if any.

    Unserved if the weights are sharded too, or the processes differ between the matrices.
    """
    meshes = _meshes(model)
    if not meshes or (len(meshes) == 1 and is_sharded(model)):
        return None
    if is_sharded(model):
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "of a model whose weights are sharded too")
    if len(meshes) > 1 or meshes[0].ndim > 1:
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "over more than one dimension of processes")
    return meshes[0].get_group()


def _meshes(model: nn.Module) -> list[Any]:
    if not is_one_of_several():
        return []
    from torch.distributed.tensor import DTensor

    found: list[Any] = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if mesh.size() > 1 and mesh not in found:
                found.append(mesh)
    return found


class InStep(Processes):
    """Processes with rows of their own that share the weights: all run equally many forwards.

    The signals are plain generation's own, one before every forward after the prefill, so that some
    processes of a group may decode plainly.
    """

    is_alone = False

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device

    def step(self) -> None:
        compat.are_unfinished(self._model, False, self._device)

    def others_go_on(self) -> bool:
        return compat.are_unfinished(self._model, True, self._device)

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        draft = propose()
        self.step()
        return draft


class _Shared(Processes):
    """Processes that hold parts of each matrix: one drafts and decides, the others receive that.

    Clocks and memories differ between processes, and logits may differ in their last bits. One
    broadcast per step carries the verdict and the draft of the next step.
    """

    is_alone = False
    runs_same = True

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._source = distributed.get_global_rank(group, 0)

    def _broadcast(self, message: StepMessage | None) -> StepMessage | None:
        """Return the message of the deciding process, None if its call has failed."""
        held = [message]
        distributed.broadcast_object_list(held, self._source, self._group, self._device)
        return held[0]


class LeadingProcess(_Shared):
    """The process that decides."""

    _is_awaited = False
    _last: tuple[Rows, Verdict] | None = None

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        draft = propose()
        self._send(draft)
        return draft

    def ready(self) -> None:
        self._is_awaited = True

    def decided(self, rows: Rows, verdict: Verdict) -> None:
        self._last = rows, verdict
        if not rows.live.any():
            self._send(DraftTree.empty(rows.num_rows))

    def broke_off(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._broadcast(None)

    def _send(self, draft: DraftTree) -> None:
        assert self._last is not None
        rows, verdict = self._last
        self._is_awaited = False
        self._broadcast(StepMessage(verdict, rows.num_text, replace(draft, evidence=None)))


class FollowingProcess(_Shared):
    """A process that receives drafts and verdicts."""

    decides = False
    _draft: DraftTree | None = None

    def draft(self, propose: Callable[[], DraftTree]) -> DraftTree:
        assert self._draft is not None
        return self._draft

    def receive(self) -> StepMessage:
        received = self._broadcast(None)
        if received is None:
            raise RuntimeError(
                f"process {self._source}, which decides for all processes that share this model's "
                "matrices, broke the call off: see the error that it raised"
            )
        self._draft = received.draft
        return received


def processes_for(
    model: Any, device: torch.device, *, synced: bool, draws: bool, assistant: Any = None
) -> Processes:
    """Return which processes decide in a call.

    `synced` processes must run equally many forwards, as `generate` computes it; verification that
    `draws` needs random numbers that depend on the draft. Unserved if the model, or an assistant,
    is split over processes in a way that is not served.
    """
    group = tensor_group(model)
    if group is None and not synced:
        if is_sharded(model):
            raise Unserved(FallbackReason.SYNCED_GPUS, type(model).__name__)
        return Processes()
    if assistant is not None and is_spread(assistant):
        detail, fix = "an assistant that is split too", "give every process the whole assistant"
        raise Unserved(FallbackReason.SYNCED_GPUS, detail, fix)
    if group is None:
        return InStep(model, device)
    if synced:
        fix = "leave synced_gpus out"
        raise Unserved(FallbackReason.TENSOR_PARALLEL, "with synced_gpus=True", fix)
    if draws:
        detail, fix = 'with verification="rejection"', 'pass verification="exact"'
        raise Unserved(FallbackReason.TENSOR_PARALLEL, detail, fix)
    kind = LeadingProcess if distributed.get_rank(group) == 0 else FollowingProcess
    return kind(group, device)

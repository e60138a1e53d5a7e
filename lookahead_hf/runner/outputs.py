"""Outputs of a step, copies of them to the host, and the scores that a device chooses by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead_hf.draft import DraftTree
from lookahead_hf.kernels.data import RowScan
from lookahead_hf.rows import Rows


class PendingCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor, copy: HostCopy) -> None:
        self.tensor, self._copy = tensor, copy
        self.bytes: torch.Tensor | None = None  # on the host
        self.arrived: Any = None  # the event behind their copy, where that has to be waited for

    def take(self) -> np.ndarray:
        """Wait for the device and return the tensor on the host."""
        if self.bytes is None:
            self._copy.send()
        assert self.bytes is not None
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.bytes.numpy().view(_NUMPY[self.tensor.dtype]).reshape(self.tensor.shape)


class HostCopy:
    """Brings tensors of one device to the host, those that are sent together in one copy.

    The decision of a step is sent at once, and the search for the best tokens is launched behind
    it: the host reads the first while the device computes the second.

    Attributes:
        scan: The step's own pass over its logits, for `topk_rows`.
        walk: `TreeWalk.packed` of the step, None if the device does not walk.
        num_nodes: Drafted nodes of each row on the device, [rows]; valid until the next step.
    """

    def __init__(
        self,
        scan: RowScan | None = None,
        walk: torch.Tensor | None = None,
        num_nodes: torch.Tensor | None = None,
    ) -> None:
        self.scan, self.walk, self.num_nodes = scan, walk, num_nodes
        self._waiting: list[PendingCopy] = []

    def add(self, tensor: torch.Tensor) -> PendingCopy:
        """Add a tensor to the next copy, with its content at that time."""
        pending = PendingCopy(tensor, self)
        self._waiting.append(pending)
        return pending

    def send(self) -> None:
        """Start to copy everything added since the last time, without waiting for it."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        parts = [pending.tensor.contiguous().view(-1).view(torch.uint8) for pending in waiting]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        host, arrived = _start_copy(data)
        for pending, piece in zip(waiting, host.split([len(part) for part in parts]), strict=True):
            pending.bytes, pending.arrived = piece, arrived


def _start_copy(data: torch.Tensor) -> tuple[torch.Tensor, Any]:
    host = data.to("cpu", non_blocking=True)  # into pinned memory, which torch allocates itself
    if not data.is_cuda:
        return host, None
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(data.device))
    return host, arrived


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a host tensor of an array from which a copy to the device waits for nothing.

    torch keeps the pinned memory until a `non_blocking` copy has read it. A copy from other memory
    waits for all earlier launches.
    """
    source = torch.from_numpy(array)
    return source.pin_memory() if device.type == "cuda" else source


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
"""Types of tensors that can be brought to the host."""


_NUM_SAMPLED = 8  # Sampled logits of a token; one NaN in its hidden states makes all of them NaN


def has_nan(logits: torch.Tensor) -> torch.Tensor:
    """Count NaN in a sample of the logits, [rows, width, vocab], of each row: [rows] int64."""
    sample = logits[:, :, :: max(1, logits.shape[2] // _NUM_SAMPLED)]
    return (sample != sample).sum((1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """A launched step."""

    logits: torch.Tensor  # the target's, [rows, width, vocab]; valid until the next step
    of_model: Any = None  # what the model's forward returned, None if the step stays on a device
    # The target's last ones, [rows, width, hidden], if a drafter reads them; valid until the next
    # step.
    hidden_states: torch.Tensor | None = None

    def count_nan(self) -> np.ndarray:
        """Count NaN in a sample of the logits of each row, [rows]."""
        return has_nan(self.logits).cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOutputs(StepOutputs):
    """A launched step that is verified on a device."""

    copy: HostCopy  # brings further tensors of the step to the host
    walk: PendingCopy  # `TreeWalk.packed`, [rows, 2 + width]
    num_nan: PendingCopy  # what `count_nan` returns, [rows]
    is_finite: PendingCopy | None  # as in `Scores`

    def count_nan(self) -> np.ndarray:
        return self.num_nan.take()


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that a device chooses the tokens of a step from."""

    values: torch.Tensor  # processed logits, or probabilities, [rows, width, vocab]
    noise: torch.Tensor | None = None  # by depth, beside probabilities, [rows, depths, vocab]
    is_finite: torch.Tensor | None = None  # whether a node's probabilities are, [rows, width] int64


Scoring = Callable[[Rows, DraftTree, torch.Tensor], Scores]
"""Turns `(rows, draft, logits [rows, width, vocab])` into scores."""

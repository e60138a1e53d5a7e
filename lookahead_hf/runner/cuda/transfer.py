"""What a step brings to the host, in two small copies; what goes the other way."""

from __future__ import annotations

import numpy as np
import torch

from lookahead_hf.kernels import RowScan


class Ticket:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor, copy: HostCopy) -> None:
        self.tensor = tensor
        self._copy = copy
        self._parcel: _Parcel | None = None
        self._start = 0

    def put(self, parcel: _Parcel, start: int) -> None:
        """Say where the tensor travels."""
        self._parcel, self._start = parcel, start

    def take(self) -> np.ndarray:
        """The tensor on the host; this is where the host waits for the device."""
        if self._parcel is None:
            self._copy.send()
        assert self._parcel is not None
        size = self.tensor.numel() * self.tensor.element_size()
        piece = self._parcel.open()[self._start : self._start + size]
        return piece.view(_NUMPY[self.tensor.dtype]).reshape(self.tensor.shape)


class HostCopy:
    """Brings tensors of one device to the host, those together that are sent together.

    What a step decides is sent when the step is launched. What drafting looks for in its logits is
    launched behind that, so that the host reads the one while the device computes the other.

    Attributes:
        scan: What the step's own pass over its logits found, for `topk_rows`.
    """

    def __init__(self, scan: RowScan | None = None) -> None:
        self.scan = scan
        self._waiting: list[Ticket] = []

    def add(self, tensor: torch.Tensor) -> Ticket:
        """Let a tensor come along with the next that are sent, as it is by then."""
        ticket = Ticket(tensor, self)
        self._waiting.append(ticket)
        return ticket

    def send(self) -> None:
        """Start to copy what was added since the last time, all in one; nothing waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        parts = [_bytes(ticket.tensor) for ticket in waiting]
        parcel = _Parcel(parts[0] if len(parts) == 1 else torch.cat(parts))
        start = 0
        for ticket, part in zip(waiting, parts, strict=True):
            ticket.put(parcel, start)
            start += len(part)


class _Parcel:
    """Bytes on their way."""

    def __init__(self, data: torch.Tensor) -> None:
        # Into pinned memory, which torch takes by itself for such a copy.
        self._host = data.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if data.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(data.device))

    def open(self) -> np.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host tensor of these numbers from which a copy to the device waits for nothing.

    torch keeps the pinned memory until the device has read it, if the copy is `non_blocking`; from
    any other memory a copy waits for all that was launched before it.
    """
    source = torch.from_numpy(array)
    return source.pin_memory() if device.type == "cuda" else source


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
"""Types that can come along."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

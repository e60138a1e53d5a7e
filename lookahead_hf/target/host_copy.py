"""What a step brings to the host, several small tensors in one copy; what goes the other way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(slots=True, eq=False)
class Ticket:
    """A tensor on its way.

    Attributes:
        array: The tensor on the host, once it was fetched.
    """

    tensor: torch.Tensor
    array: np.ndarray | None = field(default=None)

    def take(self) -> np.ndarray:
        """The tensor on the host."""
        assert self.array is not None, "fetch() comes first"
        return self.array


class HostCopy:
    """Collects tensors of one device and brings them to the host together."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def add(self, tensor: torch.Tensor) -> Ticket:
        """Let a tensor come along; its values are those at the time of `fetch`."""
        ticket = Ticket(tensor)
        self._tickets.append(ticket)
        return ticket

    def fetch(self) -> None:
        """Copy everything; this is where the host waits for the device."""
        if not self._tickets:
            return
        parts = [_bytes(ticket.tensor) for ticket in self._tickets]
        host = (parts[0] if len(parts) == 1 else torch.cat(parts)).to("cpu").numpy()
        start = 0
        for ticket, part in zip(self._tickets, parts, strict=True):
            piece = host[start : start + len(part)]
            start += len(part)
            ticket.array = piece.view(_NUMPY[ticket.tensor.dtype]).reshape(ticket.tensor.shape)
        self._tickets = []


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
